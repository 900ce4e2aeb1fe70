"""Converter between window options of the part `decoder` and config.json. Torch-free.

Llama has no sliding window, Mistral has one in all blocks, and Qwen3 specifies it per block (`layer_types`, or
`max_window_layers` if the file has no such list). As in gangline, a query attends to itself and to the
`sliding_window` - 1 tokens before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.config.ranges import NonNegativeInt, PositiveInt
from gangline.errors import UserError
from gangline_models.hugging_face.fields import check_value

if TYPE_CHECKING:
    from gangline_basics.model.config import DecoderConfig

WINDOW, FIRST = 4096, 28  # transformers' defaults of sliding_window, max_window_layers
WINDOW_FIELDS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
SLIDING, FULL = "sliding_attention", "full_attention"


def read_window(directory: str | Path, hf_config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return `window` and `full_every` from a config.json. Raises UserError for a pattern beyond these options."""
    architecture = (hf_config.get("architectures") or [None])[0]
    kinds = {"sliding_window": PositiveInt | None, "max_window_layers": NonNegativeInt | None}
    for name, hint in (kinds | {"use_sliding_window": bool | None}).items():
        check_value(name, hf_config.get(name), hint, f"{directory} holds a model")
    if architecture == "LlamaForCausalLM":
        if hf_config.get("use_sliding_window") or SLIDING in (hf_config.get("layer_types") or ()):
            raise UserError(
                f"{directory} holds a Llama model with unsupported sliding windows.",
                "transformers ignores the windows of a Llama model.",
            )
        return {}
    if architecture == "MistralForCausalLM":
        window = hf_config.get("sliding_window", WINDOW)
        types = hf_config.get("layer_types")
        if types is not None and set(types) != {FULL if window is None else SLIDING}:
            raise UserError(
                f"{directory} holds a Mistral model with unsupported layer_types={types}.",
                f"MistralForCausalLM has sliding_window={window} in every block, and transformers mixes both settings.",
                "The architecture MinistralForCausalLM supports layer_types.",
            )
        return {"window": window}
    window = hf_config.get("sliding_window", WINDOW) if hf_config.get("use_sliding_window") else None
    if window is None:
        first = layers
    else:
        first = hf_config.get("max_window_layers", FIRST)
    if first is None:
        raise UserError(f"{directory}/config.json has sliding windows, but lacks max_window_layers.")
    types = hf_config.get("layer_types") or [SLIDING if i >= first else FULL for i in range(layers)]
    if len(types) != layers:
        raise UserError(
            f"{directory} holds a model with invalid layer_types={types}.", f"The list must have {layers} entries."
        )
    slides = [kind == SLIDING for kind in types]
    if window is None or not any(slides):
        if any(slides) or set(types) - {SLIDING, FULL}:
            raise UserError(
                f"{directory} holds a model with unsupported layer_types={types}.",
                "Without a sliding window in use, every layer must be full_attention.",
            )
        return {}
    return {"window": window, "full_every": _find_full_every(directory, slides)}


def _find_full_every(directory: str | Path, slides: Sequence[bool]) -> int | None:
    if all(slides):
        return None
    every = slides.index(False) + 1
    if list(slides) != [(index + 1) % every != 0 for index in range(len(slides))]:
        raise UserError(
            f"{directory} holds a model with an unsupported pattern of sliding windows.",
            "gangline's decoder supports a window in all blocks, or in all but every n-th block (model.full_every).",
        )
    return every


def make_window_json(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    """Return the window fields of config.json. Raises UserError if the architecture does not support these windows."""
    if architecture == "LlamaForCausalLM":
        return {}
    if architecture == "MistralForCausalLM":
        if config.full_every is not None:
            raise UserError(
                f"the model cannot be exported: no Hugging Face architecture has model.full_every={config.full_every}.",
                "Mistral has the same window in every block. Qwen3 sets it per block, but requires model.qk_norm=true.",
            )
        return {"sliding_window": config.window}
    windows = [config.get_window(index) for index in range(config.layers)]
    first = next((index for index, window in enumerate(windows) if window is not None), config.layers)
    return {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": first,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }
