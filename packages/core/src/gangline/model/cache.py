"""What the modules of a model keep of a text's tokens while the next ones are written.

The first pass through the model is of all prompts, each further one of one token a row. A module that looks at earlier
tokens keeps what it needs of them in `Batch.cache`, as whatever it likes. Its node says so
(`gangline.model.tree.Node.get_decoding`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

State = TypeVar("State")


class Cache:
    """What the modules of one model keep while one batch of texts is written. length: tokens of a row at its end."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._states: dict[nn.Module, object] = {}

    def get(self, module: nn.Module, make: Callable[[int], State]) -> State:
        """What `module` keeps; on the first call what `make(length)` gives."""
        if module not in self._states:
            self._states[module] = make(self.length)
        return self._states[module]  # type: ignore[return-value]


class Carried:
    """What a module that goes from token to token hands on to the next one: None before the first."""

    def __init__(self, length: int) -> None:
        self.tensor: Tensor | None = None
