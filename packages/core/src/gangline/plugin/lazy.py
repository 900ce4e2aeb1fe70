"""Facades: modules that offer names of others, each loaded when it is first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(facade: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """(`__getattr__`, `__all__`) of the module `facade`, so that importing it loads nothing, torch least of all.

    homes: module -> the names that are from it, apart by spaces; what a package does not define is its submodule of
    that name. Type checkers read the same from a TYPE_CHECKING block.
    """
    found = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {facade!r} has no attribute {name!r}")
        module = import_module(found[name])
        value = getattr(module, name) if hasattr(module, name) else import_module(f"{found[name]}.{name}")
        setattr(sys.modules[facade], name, value)
        return value

    return get, sorted(found)
