"""Functions that torch.compile leaves out of its graphs; torch.compile is loaded only in a run that compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_every: list[Untraced] = []
_compiles = False


class Untraced(Generic[P, R]):
    """A function that torch.compile leaves out once `keep_out` was called; `is_out`: whether it was called."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._function, self.is_out, self.__doc__ = function, False, function.__doc__
        _every.append(self)
        if _compiles:
            self.keep_out()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def keep_out(self) -> None:
        """Keep torch.compile out of the function: compiled code calls it uncompiled."""
        if not self.is_out:
            self._function, self.is_out = torch.compiler.disable(self._function), True


untraced = Untraced  # as a decorator


def keep_out() -> None:
    """Keep torch.compile out of all `Untraced` functions, also of functions that are defined later."""
    global _compiles
    _compiles = True
    for function in _every:
        function.keep_out()
