"""The model of a run as lm-eval's `LM`: likelihoods of texts, and greedy answers.

B batch, T tokens, V vocabulary
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from gangline import UserError, plugins
from gangline.strategy import Batch
from gangline.tools import RunDirectory, load_model
from gangline_finetune.chat.template import JinjaTemplate, find, special_tokens

Asked = tuple[tuple[str, str], list[int], list[int]]  # texts, and tokens of context and continuation


class RunModel(TemplateLM):
    """The weights of a checkpoint, whole, in one process. Raises UserError where there are none, and for no text."""

    def __init__(self, run_dir: str, *, checkpoint: str | None = None, batch: int = 8) -> None:
        super().__init__()
        run = RunDirectory.open(run_dir).run()
        kept = plugins.build(run.checkpoint, run, None)
        held = {str(id): id for id in kept.list()}
        if checkpoint not in {None, *held} or not held:
            raise UserError(f"{run_dir} has no checkpoint {checkpoint or ''}.", f"It has {', '.join(held) or 'none'}.")
        self.id = held[checkpoint] if checkpoint else kept.latest() or list(held.values())[-1]
        self.codec: Any = run.data.codec() or plugins.build(run.data, run, "train")
        if self.codec.encode("a") is None:
            raise UserError(f"the data of {run_dir} is not text.", "Its model cannot be asked in words.")
        self.model = load_model(run, kept, self.id).eval()
        self.max_length, self.batch = run.batch.sequence_length, batch
        self._device = next(self.model.parameters()).device
        self.path = getattr(self.codec, "path", None)
        self._special = _special_of(self.path)

    # --- tokens ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """What ends a text: the tokenizer's own end, else what stands between files."""
        found = self._token("eos_token")
        found = getattr(self.codec, "separator", None) if found is None else found
        return 0 if found is None else found

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        found = self._token("bos_token")
        return self.eot_token_id if found is None else found

    def _token(self, name: str) -> int | None:
        word = self._special.get(name)
        return None if word is None else self.codec.tokenizer.token_to_id(word)

    @property
    def tokenizer_name(self) -> str:
        return str(self.path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self.codec.encode(string))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self._template.text(chat_history, prompt=add_generation_prompt)

    @property
    def _template(self) -> JinjaTemplate:
        if self.path is None:
            raise UserError("the data of this run has no chat template.", "", "Ask without --chat.")
        return find(self.path, None)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._template.source if chat_template else None

    # --- what lm-eval asks -------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests: list[Asked], **_: Any) -> list[tuple[float, bool]]:
        """Of each continuation its log-likelihood, and whether it is what the model would have written."""
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda n: -len(requests[n][1] + requests[n][2]))
        for start in range(0, len(order), self.batch):
            numbers = order[start : start + self.batch]
            asked = [((c + t)[-(self.max_length + 1) :], t) for _, c, t in (requests[n] for n in numbers)]
            logits_BTV = self._logits([tokens[:-1] for tokens, _ in asked])
            for number, (tokens, target), logits_TV in zip(numbers, asked, logits_BTV, strict=True):
                stop = len(tokens) - 1
                p_TV = logits_TV[stop - len(target) : stop].log_softmax(-1)
                wanted = torch.tensor(target, device=p_TV.device)
                greedy = bool((p_TV.argmax(-1) == wanted).all())
                found[number] = (float(p_TV.gather(-1, wanted[:, None]).sum()), greedy)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of each whole text, in windows of the context that the model was trained with."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            asked = [(("", ""), *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(asked)))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes, greedily. Raises UserError where a task wants it drawn."""
        return [self._answer(*request.args) for request in requests]

    def _answer(self, text: str, asked: dict[str, Any]) -> str:
        if asked.get("do_sample") and asked.get("temperature", 1.0) > 0:
            raise UserError("the task wants answers that are drawn.", "gangline eval writes the likeliest.")
        until = asked.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        most = int(asked.get("max_gen_toks", 256))
        row = self.tok_encode(text)[-max(1, self.max_length - most) :] or [self.prefix_token_id]
        written: list[int] = []
        while len(written) < most and len(row) < self.max_length:
            token = int(self._logits([row])[0, -1].argmax())
            if token == self.eot_token_id:
                break
            row, written = [*row, token], [*written, token]
            if any(stop in self.codec.decode(written) for stop in until):
                break
        answer = self.codec.decode(written) or ""
        for stop in filter(None, until):
            answer = answer.split(stop)[0]
        return answer

    @torch.inference_mode()
    def _logits(self, rows: list[list[int]]) -> Tensor:
        """(B, T, V) of the next token, in float32; shorter rows are filled up behind their ends."""
        T = max(map(len, rows))
        tokens_BT = torch.tensor([row + [0] * (T - len(row)) for row in rows], device=self._device)
        return self.model.logits(
            Batch(
                tokens=tokens_BT,
                targets=tokens_BT,
                loss_mask=torch.ones_like(tokens_BT, dtype=torch.bool),
                position=torch.arange(T, device=self._device).expand_as(tokens_BT),
                sample=torch.zeros(len(rows), dtype=torch.int64, device=self._device),
            )
        ).float()


def _special_of(tokenizer: str | None) -> dict[str, str]:
    """bos_token and the like, of the tokenizer_config.json beside a tokenizer.json."""
    beside = None if tokenizer is None else Path(tokenizer).expanduser().parent / "tokenizer_config.json"
    if beside is None or not beside.exists():
        return {}
    try:
        return special_tokens(json.loads(beside.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"{beside} cannot be read.", str(error)) from error
