"""Build the fake device with a C++ compiler and load it into torch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


class NoCompiler(Exception):
    """Raised if the machine has no C++ compiler."""


def load() -> ctypes.CDLL:
    """Load the fake device, built on first use; return its library.

    Raises RuntimeError if torch is already imported, because it asks for its devices only once, or if the compiler
    refuses the source; NoCompiler.
    """
    if "torch" in sys.modules:
        raise RuntimeError("load the fake device before torch: pytest -p gangline_testkit.fake_cuda.plugin")
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    library = _find_cache() / f"{_hash_build()}.so"
    if not library.exists():
        _build(torch, library)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _find_cache() -> Path:
    """Return the folder of built devices; only its owner can write there, because a library is code."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gangline", "fake-cuda")
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    return place


def _hash_build() -> str:
    """Return a name for the library built from this source for this torch and Python."""
    parts = (SOURCE.read_text(), version("torch"), sys.version)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build(torch: Path, library: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompiler("the fake device needs a C++ compiler:  apt-get install g++")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, "device.so")
        include, libraries = f"-I{torch / 'include'}", (f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu")
        command = [compiler, "-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(built), include]
        compiled = subprocess.run([*command, *libraries], capture_output=True, text=True)
        if compiled.returncode:
            raise RuntimeError(f"{compiler} cannot build the fake device:\n{compiled.stderr[-4000:]}")
        built.rename(library)  # atomic: other processes may build it at the same time
