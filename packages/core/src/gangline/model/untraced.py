"""Functions that stay out of compiled graphs, where a run compiles: elsewhere torch.compile is not loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_every: list[Untraced] = []
_compiles = False


class Untraced(Generic[P, R]):
    """A function that torch.compile is kept out of from the first `keep_out` on; `is_out`: whether that was."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._function, self.is_out, self.__doc__ = function, False, function.__doc__
        _every.append(self)
        if _compiles:
            self.keep_out()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def keep_out(self) -> None:
        """Compiled code calls it as it is."""
        if not self.is_out:
            self._function, self.is_out = torch.compiler.disable(self._function), True


untraced = Untraced  # as a decorator


def keep_out() -> None:
    """Keep torch.compile out of all such functions, also those that are made later."""
    global _compiles
    _compiles = True
    for function in _every:
        function.keep_out()
