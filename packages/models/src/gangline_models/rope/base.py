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
    """Base options of the parts of `model/rope`.

    words     option -> field of `rope_parameters` in config.json
    needed    required fields of `rope_parameters`
    nullable  fields for which null means the same as a missing field; a missing `factor` is max_position_embeddings /
              original_max_position_embeddings
    """

    kind: ClassVar[str] = ""  # rope_type in config.json
    words: ClassVar[Mapping[str, str]] = {}
    needed: ClassVar[tuple[str, ...]] = ()
    nullable: ClassVar[tuple[str, ...]] = ()

    def make_scaling(self, length: int) -> RopeScaling | None:
        """Return the RoPE scaling for rows of `length` tokens; None: no scaling."""
        return None

    @classmethod
    def read(cls, parameters: Mapping[str, Any]) -> RopeChoice:
        """Return the options that `parameters`, the `rope_parameters` of a config.json, describe."""
        options = {option: parameters[name] for option, name in cls.words.items() if parameters.get(name) is not None}
        return cls(**options)

    def to_json(self) -> dict[str, Any]:
        """Return the options as `rope_parameters`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        parameters = {name: values[option] for option, name in self.words.items() if values[option] is not None}
        return {"rope_type": self.kind, **parameters}

    def compute_max_position(self, trained: int) -> int:
        """Return max_position_embeddings for config.json. trained: sequence length of the run."""
        return trained


@dataclass
class PlainRope(RopeChoice):
    """Options of RoPE without scaling."""

    kind: ClassVar[str] = "default"


def build(config: RopeChoice, length: int) -> RopeScaling | None:
    """Build the RoPE scaling for rows of `length` tokens; None: no scaling."""
    return config.make_scaling(length)
