"""Reader of RoPE options from config.json of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters).

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.config import PositiveFloat, PositiveInt
from gangline.config.fields import resolve_hints_with_ranges
from gangline_models.hugging_face.config_reader import ConfigReader
from gangline_models.rope.base import RopeChoice
from gangline_models.rope.parts import BY_KIND

LONGEST, ORIGINAL, SHARE = "max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor"
PLAIN_WORDS = {"rope_type", "type", "rope_theta", SHARE, ORIGINAL}


def read_rope(
    reader: ConfigReader, theta: float, *, original: int | None = None, share: bool = False
) -> dict[str, Any]:
    """Return `rope_theta` and `rope` of a config.json.

    theta, original: rope_theta and original_max_position_embeddings for a file without these fields. share: the family
    supports partial RoPE. Raises UserError for scaling that no part of `model/rope` supports.
    """
    if not share:
        reader.expect(SHARE, 1.0)
    fields, silent = take_fields(reader), reader.read_given("rope_theta", theta, PositiveFloat)
    above = reader.take(ORIGINAL, original, PositiveInt)  # transformers prefers it to rope_parameters
    choice = read_choice(reader, fields, original=above, share=share)
    return {"rope_theta": _read_theta(reader, fields, silent), "rope": choice}


def take_fields(reader: ConfigReader) -> Mapping[str, Any]:
    """Return `rope_parameters`, or its older name `rope_scaling`. Raises UserError if both exist and differ."""
    parameters, old = reader.take("rope_parameters") or {}, reader.take("rope_scaling") or {}
    if parameters and old and parameters != old:
        raise reader.explain(
            "rope_scaling", old, f"rope_parameters={parameters} differs; remove one of the two fields."
        )
    fields: Mapping[str, Any] = old or parameters
    return fields


def read_layered_rope(reader: ConfigReader, theta: float, local: str | None, local_theta: float) -> dict[str, Any]:
    """Return `rope_theta`, `rope` and `local_rope_theta` from a file with full-attention and sliding-window layers.

    theta, local_theta: RoPE bases of the two layer types for a file without these fields. local: field of older files
    with the RoPE base of sliding-window layers.
    """
    parameters, old = reader.take("rope_parameters") or {}, reader.take("rope_scaling") or {}
    silent = reader.read_given("rope_theta", theta, PositiveFloat)
    near = reader.read_given(local, local_theta, PositiveFloat) if local else local_theta
    if unknown_kinds := set(parameters) - {"full_attention", "sliding_attention"}:
        raise reader.explain(
            "rope_parameters",
            ", ".join(sorted(unknown_kinds)),
            "This model has only full_attention and sliding_attention layers.",
        )
    for kind, inner in parameters.items():
        reader.check(f"rope_parameters.{kind}", inner, dict | None)
    full = {**(parameters.get("full_attention") or {}), **old}
    sliding = parameters.get("sliding_attention") or {}
    if old and "rope_type" not in old and old.get("type", "default") != "default":
        why = "If layer types differ, transformers reads only rope_type and ignores type."
        raise reader.explain("rope_scaling", old, f"{why} Rename type to rope_type.")
    if not isinstance(read_choice(reader, sliding), BY_KIND["default"]):
        raise reader.explain(
            "rope_parameters.sliding_attention",
            sliding,
            "gangline supports RoPE scaling only in full-attention layers.",
        )
    if full.get("truncate", True) is not True:
        raise reader.explain("truncate", full["truncate"], "transformers ignores truncate if layer types differ.")
    if not local and "rope_theta" not in sliding and silent != near:
        why = f"Layers with a window then use {near} in transformers: set their rope_theta in rope_parameters."
        raise reader.explain("rope_theta", silent, why)
    return {
        "rope_theta": _read_theta(reader, full, silent),
        "rope": read_choice(reader, full),
        "local_rope_theta": _read_theta(reader, sliding, near),
    }


def _read_theta(reader: ConfigReader, said: Mapping[str, Any], silent: float) -> float:
    if (theta := said.get("rope_theta", silent)) is None:
        raise reader.explain("rope_theta", "null", "RoPE requires a base.")
    return float(reader.check("rope_theta", theta, PositiveFloat))


def read_choice(
    reader: ConfigReader, fields: Mapping[str, Any], *, original: int | None = None, share: bool = False
) -> RopeChoice:
    """Return the options of the part of `model/rope` that `rope_parameters` describe.

    original: original_max_position_embeddings at the top level of config.json, if any. share: the family supports
    partial RoPE.
    """
    kind = reader.check("rope_type", fields.get("rope_type", fields.get("type", "default")), str | None)
    kind = "longrope" if kind == "su" else kind
    if kind not in BY_KIND:
        raise reader.explain("rope_type", kind, f"gangline supports {', '.join(BY_KIND)}.")
    config = BY_KIND[kind]
    words = set(config.words.values()) - {LONGEST}  # max_position_embeddings is outside rope_parameters
    if unknown_fields := {
        name: value for name, value in fields.items() if name not in words | PLAIN_WORDS and value is not None
    }:
        has = ", ".join(sorted(words)) or "no further fields"
        raise reader.explain("rope_parameters", unknown_fields, f"For rope_type={kind} gangline supports {has}.")
    if not share and fields.get(SHARE, 1.0) != 1.0:
        raise reader.explain(SHARE, fields[SHARE], "gangline's model rotates all features of a head.")
    for name in sorted(words):
        if name in config.needed and name not in fields:
            raise reader.explain_missing(f"{name} in rope_parameters with rope_type={kind}")
        if name in fields and fields[name] is None and name not in config.nullable:
            raise reader.explain(f"rope_parameters.{name}", "null", "The field must not be null.")
    ranges = {name: resolve_hints_with_ranges(config)[option] for option, name in config.words.items()}
    checked_fields = {
        name: reader.check(name, fields[name], ranges[name]) for name in words if fields.get(name) is not None
    }
    if ORIGINAL in words:
        length = original or checked_fields.get(ORIGINAL) or reader.require(LONGEST, PositiveInt)
        checked_fields[ORIGINAL] = reader.check(ORIGINAL, length, ranges[ORIGINAL])
        if "factor" not in checked_fields:
            checked_fields["factor"] = reader.require(LONGEST, PositiveInt) / checked_fields[ORIGINAL]
    if LONGEST in config.words.values():
        checked_fields[LONGEST] = reader.require(LONGEST, PositiveInt)
    return config.read(checked_fields)
