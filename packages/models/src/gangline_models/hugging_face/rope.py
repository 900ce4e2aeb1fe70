"""Rotary positions in the words of config.json: of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters).

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline_models.hugging_face.config_reader import ConfigReader
from gangline_models.rope.base import RopeChoice
from gangline_models.rope.parts import BY_KIND

PLAIN_WORDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read_rope(reader: ConfigReader, theta: float = 10_000.0) -> dict[str, Any]:
    """`rope_theta` and `rope`. theta: where a file is silent. Raises UserError for what no part of `model/rope` is."""
    given = reader.take("rope_parameters") or {}
    old = reader.take("rope_scaling") or {}
    silent = reader.take("rope_theta", theta)
    said = {**old, **given}
    return {"rope_theta": float(said.get("rope_theta", silent)), "rope": read_choice(reader, said)}


def read_layered_rope(reader: ConfigReader, theta: float, local: str | None, local_theta: float) -> dict[str, Any]:
    """The same of a file that says it for each kind of layer, and `local_rope_theta` of those with a window.

    local: the field of older files that says the latter.
    """
    given, old = reader.take("rope_parameters") or {}, reader.take("rope_scaling") or {}
    silent = reader.take("rope_theta", theta)
    near = reader.take(local, local_theta) if local else silent
    full = {**old, **given.get("full_attention", {})}
    sliding = given.get("sliding_attention", {})
    if left := set(given) - {"full_attention", "sliding_attention"}:
        raise reader.refused("rope_parameters", ", ".join(sorted(left)), "Its layers have a window or none.")
    if not isinstance(read_choice(reader, sliding), BY_KIND["default"]):
        raise reader.refused("rope_parameters.sliding_attention", sliding, "gangline scales layers without window.")
    return {
        "rope_theta": float(full.get("rope_theta", silent)),
        "rope": read_choice(reader, full),
        "local_rope_theta": float(sliding.get("rope_theta", near)),
    }


def read_choice(reader: ConfigReader, said: Mapping[str, Any]) -> RopeChoice:
    """The part of `model/rope` that `rope_parameters` ask for."""
    kind = said.get("rope_type", said.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in BY_KIND:
        raise reader.refused("rope_type", kind, f"gangline has {', '.join(BY_KIND)}.")
    config = BY_KIND[kind]
    longest = reader.take("max_position_embeddings")
    original = reader.take("original_max_position_embeddings") or said.get("original_max_position_embeddings")
    known = PLAIN_WORDS | set(config.words.values()) | {"original_max_position_embeddings"}
    if left := {name: value for name, value in said.items() if name not in known and value is not None}:
        raise reader.refused("rope_parameters", left, f"gangline's {kind} has {', '.join(config.words.values())}.")
    more: dict[str, Any] = {"max_position_embeddings": longest, "original_max_position_embeddings": original}
    if longest and original and said.get("factor") is None:
        more["factor"] = longest / original
    return config.read({**more, **{name: value for name, value in said.items() if value is not None}})
