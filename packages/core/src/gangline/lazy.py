"""Facades: modules that offer names of others, each loaded when it is first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(facade: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """(`__getattr__`, `__all__`) of the module `facade`, so that importing it loads nothing, torch least of all.

    homes: module -> the names that are from it, apart by spaces; "read as read_records" gives a name another, and what
    a package does not define is its submodule of that name. Type checkers read the same from a TYPE_CHECKING block.
    """
    found = {}
    for home, names in homes.items():
        source, _, renamed = names.partition(" as ")
        found |= {renamed: (home, source)} if renamed else {name: (home, name) for name in names.split()}

    def get(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {facade!r} has no attribute {name!r}")
        home, source = found[name]
        module = import_module(home)
        value = getattr(module, source) if hasattr(module, source) else import_module(f"{home}.{source}")
        setattr(sys.modules[facade], name, value)
        return value

    return get, sorted(found)
