"""Conversion between options and the layer types in config.json, such as sliding_attention. Torch-free.

As in gangline, a query attends to itself and to the `sliding_window` - 1 tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gangline_models.hugging_face.config_reader import ConfigReader

SLIDING, FULL, LINEAR_LAYER = "sliding_attention", "full_attention", "linear_attention"


def read_types(reader: ConfigReader, absent: Sequence[str]) -> Sequence[str]:
    """Return the type of each layer; `absent` without field `layer_types`. Raises UserError for a wrong length."""
    if (types := reader.take("layer_types", hint=list[str])) is None:
        return absent
    if len(types) != len(absent):
        raise reader.explain("layer_types", types, f"The list must have {len(absent)} entries, one per layer.")
    return list(types)


def read_windows(reader: ConfigReader, window: int | None, types: Sequence[str]) -> dict[str, Any]:
    """Return options `window`, `full_first`, `full_every`. Raises UserError if they cannot describe `types`."""
    slides = [kind == SLIDING for kind in types]
    if unknown := set(types) - {SLIDING, FULL}:
        raise reader.explain("layer_types", ", ".join(sorted(unknown)), f"gangline supports {SLIDING} and {FULL}.")
    if window is None or not any(slides):
        if any(slides):
            raise reader.explain("layer_types", SLIDING, "The sliding window of the model is null or off.")
        return {"window": None, "full_first": 0, "full_every": None}
    first = slides.index(True)
    if all(slides[first:]):
        return {"window": window, "full_first": first, "full_every": None}
    every = slides.index(False) + 1
    if slides != [(index + 1) % every != 0 for index in range(len(slides))]:
        raise reader.explain(
            "layer_types", list(types), "Full attention must be in the first n layers, or in every n-th layer."
        )
    return {"window": window, "full_first": 0, "full_every": every}


def read_every(reader: ConfigReader, types: Sequence[str], other: str) -> int | None:
    """Return n if the last of every n layers has full attention and other layers are `other`; None: no full attention.

    Raises UserError for another order.
    """
    every = list(types).index(FULL) + 1 if FULL in types else None
    if list(types) != [FULL if every and (index + 1) % every == 0 else other for index in range(len(types))]:
        raise reader.explain(
            "layer_types", list(types), f"gangline supports {FULL} only in every n-th layer, else {other}."
        )
    return every


def list_layer_types(windows: Iterable[int | None]) -> list[str]:
    """Return the type of each layer. windows: sliding window of each layer; None: full attention."""
    return [FULL if window is None else SLIDING for window in windows]
