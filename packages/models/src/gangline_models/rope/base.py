"""Base class of RoPE scaling methods. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from gangline.config import PartConfig

if TYPE_CHECKING:
    from gangline_basics.model.rope_rates import RopeScaling

GROUP = "model/rope"


@dataclass
class RopeChoice(PartConfig):
    """Base of the parts of `model/rope`.

    words     option -> field of `rope_parameters` in config.json
    needed    fields that a file must have
    nullable  fields that may be null, which equals a missing field: a `factor` then follows from the two lengths
    """

    kind: ClassVar[str] = ""  # rope_type in config.json
    words: ClassVar[Mapping[str, str]] = {}
    needed: ClassVar[tuple[str, ...]] = ()
    nullable: ClassVar[tuple[str, ...]] = ()

    def make_scaling(self, length: int) -> RopeScaling | None:
        """Return the scaling for rows of `length` tokens; None: unscaled frequencies."""
        return None

    @classmethod
    def read(cls, theirs: Mapping[str, Any]) -> RopeChoice:
        """Return the options of `rope_parameters`."""
        options = {ours: theirs[name] for ours, name in cls.words.items() if theirs.get(name) is not None}
        return cls(**options)

    def to_json(self) -> dict[str, Any]:
        """Return the options as `rope_parameters`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        parameters = {name: values[ours] for ours, name in self.words.items() if values[ours] is not None}
        return {"rope_type": self.kind, **parameters}

    def compute_max_position(self, trained: int) -> int:
        """Return max_position_embeddings of a model trained on rows of `trained` tokens."""
        return trained


@dataclass
class PlainRope(RopeChoice):
    """RoPE without scaling."""

    kind: ClassVar[str] = "default"


def build(config: RopeChoice, length: int) -> RopeScaling | None:
    """Build the scaling of a part of the group."""
    return config.make_scaling(length)
