"""The training state's document: all that is not an array. The same on every rank; one small JSON file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1


@dataclass
class Document:
    """What a checkpoint says beside its arrays.

    The arrays are ``model/...`` (master weights and persistent buffers), ``optimizer/<state>/...`` and, of one
    layout only, ``local/...``.
    """

    step: int  # steps done
    attempt: int
    cursor: int  # the next global sample number
    seed: int  # with `step` and the cursor all that random draws depend on
    tokens: int = 0  # valid tokens seen so far
    version: int = VERSION
    parts: dict[str, Any] = field(default_factory=dict)  # group -> {"part", "distribution", "version"}
    states: dict[str, Any] = field(default_factory=dict)  # "optimizer", "precision", "data", "health.nan" -> state()
    data: str = ""  # the source's fingerprint
    model: str = ""  # a fingerprint of the model's arrays: names and shapes
    base: dict[str, Any] = field(default_factory=dict)  # of what is not trained and not among the arrays, if anything
    mesh: dict[str, int] = field(default_factory=dict)  # the layout that wrote it, for people; no reader needs it
    config: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Document:
        """From stored JSON; fields of a newer writer are passed over. Raises ValueError where one has no meaning."""
        fields = {key: value for key, value in content.items() if key in cls.__dataclass_fields__}
        for name in ("step", "attempt", "cursor", "seed"):
            if type(fields.get(name)) is not int:
                raise ValueError(f"its {name} is {fields.get(name)!r}, not a whole number")
        for name in ("parts", "states", "base", "mesh", "config"):
            if not isinstance(fields.get(name, {}), dict):
                raise ValueError(f"its {name} are {fields[name]!r}")
        return cls(**fields)
