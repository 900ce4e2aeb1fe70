"""RoPE options in config.json of transformers 4 (rope_scaling) and 5 (rope_parameters). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gangline.errors import UserError
from gangline_models.hugging_face.fields import check_value

# option -> field of config.json, for rope_type=llama3
SCALING = {
    "rope_scaling_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_max_position": "original_max_position_embeddings",
}
ORIGINAL, SHARE = SCALING["rope_original_max_position"], "partial_rotary_factor"
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", SHARE, ORIGINAL)  # fields of a config.json
PLAIN = {"rope_type", "type", "rope_theta", SHARE, ORIGINAL}


def read_rope(directory: str | Path, hf_config: Mapping[str, Any], ranges: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE options of a config.json. A missing field has the default of transformers.

    ranges: option -> its type and range. Raises UserError for unsupported features, and for an incomplete scaling.
    """
    parameters, old = hf_config.get("rope_parameters") or {}, hf_config.get("rope_scaling") or {}
    if parameters and old and parameters != old:
        what = f"{directory} holds a model with rope_scaling={old} and different rope_parameters."
        raise UserError(what, f"rope_parameters={parameters}; remove one of the two fields from config.json.")
    rope = old or parameters
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(
            f"{directory} holds a model with unsupported rope_type={kind}.",
            "gangline's decoder supports rope_type default and llama3.",
        )
    known_names = PLAIN | (set(SCALING.values()) if kind == "llama3" else set())
    unknown_fields = {name: value for name, value in rope.items() if name not in known_names and value is not None}
    if (share := rope.get(SHARE, hf_config.get(SHARE, 1.0))) != 1.0:
        unknown_fields[SHARE] = share
    if unknown_fields:
        what = f"{directory} holds a model with unsupported rope_parameters={unknown_fields} of rope_type={kind}."
        raise UserError(what, "gangline's decoder does not implement these parameters.")
    theta = rope.get("rope_theta", hf_config.get("rope_theta", 10_000.0))
    if kind == "default":
        scaled = {}
    else:
        lengths = {ORIGINAL: hf_config.get("max_position_embeddings")} | dict(rope)
        if ORIGINAL in hf_config:  # a field at the top level has precedence
            lengths[ORIGINAL] = hf_config[ORIGINAL]
        scaled = {option: lengths.get(name) for option, name in SCALING.items()}
    missing = [SCALING[name] for name, value in scaled.items() if value is None]
    missing += ["rope_theta"] if theta is None else []
    if missing:
        raise UserError(f"{directory}/config.json lacks {', '.join(missing)} of the RoPE parameters.")
    holder = f"{directory} holds a model"
    for option, value in scaled.items():
        check_value(SCALING[option], value, ranges[option], holder)
    return {"rope_theta": float(check_value("rope_theta", theta, ranges["rope_theta"], holder)), **scaled}
