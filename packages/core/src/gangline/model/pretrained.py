"""Pretrained weights: the contract of readers, the capability `pretrained` of a model's part. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gangline.errors import Problem, UserError
from gangline.plugin import registry

if TYPE_CHECKING:
    from gangline.config.schema import ModelConfig, Run
    from gangline.plan import Plan
    from gangline.shard import Shard

CAPABILITY = "pretrained"


class Pretrained(ABC):
    """Reader of a model's weights directory (`ModelConfig.get_weights_directory`). No arguments; torch-free."""

    @abstractmethod
    def find_problems(self, run: Run) -> list[Problem]:
        """Return the problems of the directory for this model that can be found before processes start."""

    @abstractmethod
    def check_names(self, directory: str, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the names of the directory's tensors with those of the model.

        shapes: shape of each parameter and persistent buffer. Raises UserError for a tensor that the model lacks.
        """

    @abstractmethod
    def load(self, directory: str, shards: Iterable[Shard], plan: Plan, seed: int) -> None:
        """Fill this rank's `model/...` shards in place; draw optional parameters that the directory lacks, by `seed`.

        Raises UserError for a tensor that is missing, has another shape, or that the model lacks.
        """


def find_pretrained(config: ModelConfig) -> Pretrained:
    """Return the reader of a model's pretrained weights. Raises UserError if it is missing or not installed."""
    if (reader_class := registry.load_capability(config, CAPABILITY)) is None:
        name = registry.installed().find_part(config).part.name
        raise UserError(
            f"model={name} cannot read the pretrained weights in {config.get_weights_directory()}.",
            f"The part must have the capability {CAPABILITY!r}: a gangline.model.pretrained.Pretrained.",
        )
    reader: Pretrained = reader_class()
    return reader
