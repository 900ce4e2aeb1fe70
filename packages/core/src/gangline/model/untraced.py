"""Functions that torch.compile leaves out of its graphs; torch.compile is loaded only in a run that compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class untraced(Generic[P, R]):
    """Decorator of `function`, which torch.compile leaves out after `keep_out`. is_out: whether that was called."""

    is_out = False

    def __init__(self, function: Callable[P, R]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


def keep_out() -> None:
    """Keep torch.compile out of all `untraced` functions: compiled code calls them uncompiled."""
    if not untraced.is_out:
        # The method, not each function: else Dynamo would compile this method, with guards on the arguments of all.
        untraced.__call__ = torch.compiler.disable(untraced.__call__)  # type: ignore[method-assign]
        untraced.is_out = True
