"""Options of mtp=on (multi-token prediction). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gangline import Part, Problem
from gangline.config import EditConfig, NonNegativeFloat, PositiveInt

if TYPE_CHECKING:
    from gangline.config import Run


@dataclass
class Mtp(EditConfig):
    """Options of `mtp=on`: multi-token prediction (MTP) modules after the last block (DeepSeek-V3, arXiv 2412.19437).

    Module k predicts the token k positions after the next token. The modules' mean cross-entropy times `weight` is the
    metric `mtp_loss`; it contributes to the gradients, not to the reported loss. Modules share embedding and head with
    the model. Evaluation and generation ignore the modules.
    """

    depth: PositiveInt = 1  # number of MTP modules, each of which predicts one more token
    weight: NonNegativeFloat = 0.3  # weight of the multi-token prediction (MTP) loss; DeepSeek-V3: 0.3, later 0.1

    def summarise(self, metrics: Mapping[str, float | list[float]]) -> dict[str, float | list[float]]:
        """Return the mean cross-entropy of each MTP module over its targets, as "mtp/DEPTH"."""
        nats, targets = metrics.get("mtp_nats"), metrics.get("mtp_targets")
        if not isinstance(nats, list) or not isinstance(targets, list):
            return {}
        pairs = enumerate(zip(nats, targets, strict=True), 1)
        return {f"mtp/{depth}": total / count for depth, (total, count) in pairs if count}

    def check(self, run: Run) -> list[Problem]:
        if self.depth < run.batch.sequence_length:
            return self._check_files(run) or self._check_frozen(run)
        what = f"mtp.depth={self.depth}: too large for rows of {run.batch.sequence_length} tokens."
        return [Problem(what, "", f"mtp.depth={run.batch.sequence_length - 1} or less.")]

    def _check_files(self, run: Run) -> list[Problem]:
        """Return a problem if the directory in model.weights has only some of the MTP modules' tensors."""
        there, lacks = self._list_found(run)
        if not there or not lacks:
            return []
        what = (
            f"model.weights={run.model.get_weights_directory()} holds only some of the weights "
            f"that mtp.depth={self.depth} needs."
        )
        return [Problem(what, f"Missing tensors: {', '.join(lacks[:3])}.", "Set another mtp.depth, or mtp=off.")]

    def _check_frozen(self, run: Run) -> list[Problem]:
        """Return a problem if another edit, such as lora, freezes MTP weights that are only initialised, not loaded."""
        from gangline.run.directory import holds_checkpoint

        others = [group for group, edit in run.edits.items() if edit is not self]
        if not others or holds_checkpoint(run):
            return []
        from gangline_models.mtp.edit import list_frozen

        there, lacks = self._list_found(run)
        names = [] if there and not lacks else list_frozen(run)
        if not names:
            return []
        off = " or ".join(f"{group}=off" for group in others)
        what = f"mtp=on with {' and '.join(others)} would freeze the weights of the MTP modules at random values."
        why = f"Frozen parameters without pretrained weights: {', '.join(names[:3])}{' and more' if names[3:] else ''}."
        return [Problem(what, why, f"mtp=off, or {off}; or model.weights=DIR of a DeepSeek-V3 with MTP weights.")]

    def list_notices(self, run: Run) -> list[str]:
        from gangline_models.mtp.edit import list_hf_names

        if not list_hf_names(run):
            return [
                "mtp: an export omits the MTP weights, because Hugging Face files of this model have no such tensors."
            ]
        _, lacks = self._list_found(run)
        return (
            [f"model.weights={run.model.get_weights_directory()} has no MTP weights: they are initialised randomly."]
            if lacks
            else []
        )

    def _list_found(self, run: Run) -> tuple[list[str], list[str]]:
        """Return names of MTP tensors: (present in model.weights, missing there); ([], []) if no weights are loaded."""
        from gangline.run.directory import holds_checkpoint

        directory = run.model.get_weights_directory()
        if directory is None or holds_checkpoint(run):
            return [], []
        from gangline_models.hugging_face.tensors import list_tensor_names
        from gangline_models.mtp.edit import list_hf_names

        stored_names, module_names = list_tensor_names(directory), list_hf_names(run)
        return [name for name in module_names if name in stored_names], [
            name for name in module_names if name not in stored_names
        ]


PART = Part(
    name="on",
    group="mtp",
    config=Mtp,
    build="gangline_models.mtp.edit:edit",
    capabilities={"hugging_face": "gangline_models.mtp.interop:MtpFormat"},
    summary="Multi-token prediction (MTP): modules predict further tokens and add their loss to the gradients",
)
