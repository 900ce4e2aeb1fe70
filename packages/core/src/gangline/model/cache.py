"""Decoding cache: the state of earlier tokens that modules store while a text is generated.

The first forward pass takes all prompts, each later pass one token per row. A module that reads earlier tokens stores
its state in `Batch.cache`, in any form; its node declares so (`gangline.model.tree.Node.get_decoding`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

State = TypeVar("State")


class Cache:
    """State of a model's modules during the generation of one batch. length: number of tokens per row at the end."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._states: dict[nn.Module, object] = {}

    def get(self, module: nn.Module, make: Callable[[int], State]) -> State:
        """Return the state that `module` stores; the first call creates it by `make(length)`."""
        if module not in self._states:
            self._states[module] = make(self.length)
        return self._states[module]  # type: ignore[return-value]


class Carried:
    """Recurrent state that a module passes from token to token: None before the first token."""

    def __init__(self, length: int) -> None:
        self.tensor: Tensor | None = None
