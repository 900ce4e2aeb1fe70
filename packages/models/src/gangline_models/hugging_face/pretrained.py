"""Capability `pretrained` of models: initial weights from a Hugging Face directory. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gangline import Problem
from gangline.model.pretrained import Pretrained
from gangline_models.hugging_face.config import check_weights

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.plan import Plan
    from gangline.shard import Shard


class HuggingFace(Pretrained):
    """Pretrained weights in a directory with config.json and safetensors; the plan has tensor names (`Plan.names`)."""

    def find_problems(self, run: Run) -> list[Problem]:
        return check_weights(run)

    def check_names(self, directory: str, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> None:
        from gangline_models.hugging_face.read import check_names

        check_names(directory, plan, shapes)

    def load(self, directory: str, shards: Iterable[Shard], plan: Plan, seed: int) -> None:
        from gangline_models.hugging_face.read import load_pretrained

        load_pretrained(directory, shards, plan, seed)
