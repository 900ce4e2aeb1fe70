"""What every way of scaling rotary positions says of itself. Torch-free."""

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
    """The base of the parts of `model/rope`. `words`: option -> the field of their `rope_parameters`.

    `needed` of these a file must give; `nullable` may be null there, which is as if they were not there, but that a
    `factor` follows from the two lengths then.
    """

    kind: ClassVar[str] = ""  # their rope_type
    words: ClassVar[Mapping[str, str]] = {}
    needed: ClassVar[tuple[str, ...]] = ()
    nullable: ClassVar[tuple[str, ...]] = ()

    def make_scaling(self, length: int) -> RopeScaling | None:
        """The rates for rows of `length` tokens; None: those of the base."""
        return None

    @classmethod
    def read(cls, theirs: Mapping[str, Any]) -> RopeChoice:
        """From their `rope_parameters`."""
        options = {ours: theirs[name] for ours, name in cls.words.items() if theirs.get(name) is not None}
        return cls(**options)

    def to_json(self) -> dict[str, Any]:
        """As their `rope_parameters` say it."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        parameters = {name: values[ours] for ours, name in self.words.items() if values[ours] is not None}
        return {"rope_type": self.kind, **parameters}

    def compute_max_position(self, trained: int) -> int:
        """Their max_position_embeddings of a model that was trained on rows of so many tokens."""
        return trained


@dataclass
class PlainRope(RopeChoice):
    """The rates of the base alone."""

    kind: ClassVar[str] = "default"


def build(config: RopeChoice, length: int) -> RopeScaling | None:
    """What a part of the group builds."""
    return config.make_scaling(length)
