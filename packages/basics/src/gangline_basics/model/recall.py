"""Cache of a value that every layer of a forward pass needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class Recall:
    """Cache of the last value derived from a tensor, returned for the identical tensor.

    It compares identity, not equality (it reads no values, so it does not synchronize with a GPU), and the tensor's
    version, so that a tensor written in place counts as new. A compiled graph recomputes the value: the compiler
    fuses the few operations into the following ones.
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
