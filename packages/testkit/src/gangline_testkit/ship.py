"""Send functions and values from a test file to a rank.

A test file collected with ``--import-mode=importlib`` has a module name that other processes cannot import. A parcel
therefore contains the pickle and the path of each such file. The rank loads these files under their module names before
it unpickles.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from gangline.plugin.registry import installed


@dataclass(frozen=True)
class Parcel:
    """Pickle, with the files of modules that cannot be imported by name, and the sender's `sys.path` for the others."""

    content: bytes
    files: dict[str, str]
    path: list[str]


class _Noting(pickle.Pickler):
    """Pickler that records the module of every class and function in the pickle."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        module = getattr(obj, "__module__", None)
        if isinstance(module, str) and hasattr(obj, "__qualname__"):
            self.modules.add(module)
        return NotImplemented


def pack(value: Any) -> Parcel:
    """Return a parcel of a value. Raises pickle.PicklingError for a lambda or a nested function in the value."""
    buffer = io.BytesIO()
    pickler = _Noting(buffer)
    pickler.dump(value)
    files = {}
    for name in pickler.modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not _is_importable(name, file):
            files[name] = file
    return Parcel(buffer.getvalue(), files, list(sys.path))


_added: set[str] = set()  # entries of sys.path that parcels added in this process


def unpack(parcel: Parcel) -> Any:
    """Return the value of a parcel, after adding the sender's `sys.path` entries, so that its plugins are found."""
    leftovers = _added - set(parcel.path)
    new = [entry for entry in parcel.path if entry not in sys.path]
    if leftovers or new:
        sys.path[:] = [*(entry for entry in sys.path if entry not in leftovers), *new]
        _added.difference_update(leftovers)
        _added.update(new)
        installed.cache_clear()
    for name, file in parcel.files.items():
        if getattr(sys.modules.get(name), "__file__", None) != file:
            load_file(name, file)
    return pickle.loads(parcel.content)


def load_file(name: str, file: str) -> ModuleType:
    """Import `file` as the module `name`, with empty parent packages if they are missing, and return the module."""
    parent = name.rpartition(".")[0]
    while parent and parent not in sys.modules:
        sys.modules[parent] = ModuleType(parent)
        sys.modules[parent].__path__ = []
        parent = parent.rpartition(".")[0]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_importable(name: str, file: str) -> bool:
    """Return whether an import of `name` in another process with this `sys.path` loads `file`."""
    where, spec = None, None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), where)
        if spec is None:
            return False
        where = spec.submodule_search_locations
    return spec is not None and spec.origin == file
