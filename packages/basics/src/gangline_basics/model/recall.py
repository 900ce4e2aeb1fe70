"""Compute once what every layer of a forward pass asks for again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class Recall:
    """Keeps the last value derived from a tensor, and gives it again while asked with the very same tensor.

    Identity, not equality, is what is compared (no look at the values, so no wait for a GPU), with the
    tensor's version, so that a tensor written in place counts as another. A compiled graph computes afresh: the
    compiler fuses the few operations into what follows.
    """

    def __init__(self) -> None:
        self._last: tuple[Hashable, Tensor | None, int, Any] = (None, None, 0, None)

    def __call__(self, key: Hashable, source: Tensor, compute: Callable[[], Any]) -> Any:
        if torch.compiler.is_compiling() or source.is_inference():
            return compute()
        last_key, last_source, version, value = self._last
        if last_source is source and version == source._version and last_key == key:
            return value
        value = compute()
        self._last = (key, source, source._version, value)
        return value
