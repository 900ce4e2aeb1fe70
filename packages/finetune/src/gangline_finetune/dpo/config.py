"""Options of `data=preferences` and `dpo=on`. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gangline import Problem
from gangline.config import EditConfig, PositiveFloat
from gangline.plugin.registry import installed
from gangline_finetune.chat.config import TemplatedConfig

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_basics.data.answers import RenderedChat
    from gangline_basics.data.chat import ChatTemplate


@dataclass
class PreferencesConfig(TemplatedConfig):
    """Options of `data=preferences`: pairs of a chosen and a rejected answer to one prompt, for `dpo=on`.

    A row of a file has the fields `prompt`, `chosen` and `rejected`: texts, or lists of messages. `chosen` and
    `rejected` may be complete chats with a common prefix; `prompt` may then be missing. If `chosen` or `rejected` holds
    several answers, all its answers are scored, but not the user and tool messages between them. A sample is a pair:
    both chats in one row, without attention between the chats.
    """

    holds: ClassVar[str] = "pairs"

    def check(self, run: Run) -> list[Problem]:
        if "dpo" not in run.edits:
            why = "The samples are pairs of answers, and only the DPO loss can train on pairs."
            return [
                *super().check(run),
                Problem("data=preferences requires dpo=on, and dpo is off.", why, "dpo=on"),
            ]
        return super().check(run)

    def make_renderer(self, row: dict[str, Any], where: str) -> Callable[[ChatTemplate], list[RenderedChat]]:
        from gangline_basics.data.answers import render_chat
        from gangline_basics.data.chat_rows import parse_tools
        from gangline_finetune.dpo.pairs import parse_pair

        pair = parse_pair(row, where)
        first, sides, tools = len(pair.prompt), (pair.chosen, pair.rejected), parse_tools(row, f"data.path: {where}")
        return lambda template: [
            render_chat(template.bind_tools(tools), [*pair.prompt, *side], first) for side in sides
        ]


@dataclass
class DpoConfig(EditConfig):
    """Loss of direct preference optimization (DPO), in place of cross-entropy: a mean over pairs.

        -log sigmoid(beta · (log(p(chosen) / q(chosen)) - log(p(rejected) / q(rejected))))

    p is the trained model, q the reference model, which has the initial weights. The reference model scores all pairs
    once, before the first step, so that memory never holds a second model.
    """

    beta: PositiveFloat = 0.1  # DPO beta: strength of the penalty for diverging from the reference model

    def check(self, run: Run) -> list[Problem]:
        if not isinstance(run.data, PreferencesConfig):
            kind = installed().find_part(run.data).part.name
            what = "dpo=on requires preference pairs (chosen and rejected answers)."
            return [Problem(what, f"data={kind} has no preference pairs.", "data=preferences data.path=FILE")]
        from gangline_finetune.dpo.edit import find_token_loss

        if not (path := find_token_loss(run)):
            return []
        return [
            Problem(
                f"dpo=on does not support the loss that {path} adds.",
                "That loss sums over the tokens in the loss mask, and a pair has only one token in the mask.",
                "Set the weight of that loss to 0 (for a router: seq_aux_loss, global_aux_loss and z_loss).",
            )
        ]

    def summarise(self, metrics: Mapping[str, float | list[float]]) -> dict[str, float | list[float]]:
        """Return a step's dpo/accuracy and dpo/margin.

        dpo/accuracy is the share of pairs whose chosen answer gained more log-likelihood than the rejected answer, and
        dpo/margin is the mean margin of the pairs.
        """
        pairs = metrics.get("dpo_pairs")
        if not isinstance(pairs, float | int) or not pairs:
            return {}
        return {
            f"dpo/{name}": float(metrics[f"dpo_{metric}"]) / pairs  # type: ignore[arg-type]
            for name, metric in (("accuracy", "won"), ("margin", "margin"))
        }
