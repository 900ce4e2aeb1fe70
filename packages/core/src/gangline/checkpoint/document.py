"""Metadata of a checkpoint: all training state except arrays, equal on every rank, in one small JSON document."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1


@dataclass
class Document:
    """State that a checkpoint stores next to its arrays.

    Arrays of a checkpoint are ``model/...`` (master weights and persistent buffers), ``optimizer/<state>/...`` and
    ``local/...``, which only one layout can use.
    """

    step: int  # number of steps done
    attempt: int
    cursor: int  # number of the next global sample
    seed: int  # run.seed; with `step` and `cursor` it determines all later random numbers
    tokens: int = 0  # number of valid tokens trained on
    version: int = VERSION
    parts: dict[str, Any] = field(default_factory=dict)  # group -> {"part", "distribution", "version"}
    states: dict[str, Any] = field(default_factory=dict)  # "optimizer", "precision", "data", "health.nan" -> state()
    data: str = ""  # fingerprint of the data source
    model: str = ""  # fingerprint of the model's arrays: names and shapes
    base: dict[str, Any] = field(default_factory=dict)  # metadata of base weights that the checkpoint leaves out
    mesh: dict[str, int] = field(default_factory=dict)  # layout that saved the checkpoint, for display only
    config: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Document:
        """Return the document from stored JSON; ignore unknown fields. Raises ValueError for invalid fields."""
        fields = {key: value for key, value in content.items() if key in cls.__dataclass_fields__}
        for name in ("step", "attempt", "cursor", "seed"):
            if type(fields.get(name)) is not int:
                raise ValueError(f"the field {name} is {fields.get(name)!r}, not an integer")
        for name in ("parts", "states", "base", "mesh", "config"):
            if not isinstance(fields.get(name, {}), dict):
                raise ValueError(f"the field {name} is {fields[name]!r}, not a mapping")
        return cls(**fields)
