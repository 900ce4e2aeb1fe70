"""Temporary installation of a plugin, for tests.

The plugin gets real metadata on `sys.path`, so that it is found, composed and listed like an installed plugin.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def as_installed(distribution: str, module: str, *, path: str | Path | None = None) -> Iterator[None]:
    """Make `module` the entry module of an installed `distribution` in the block. path: directory of the module.

    Raises the exception of the import if the module cannot be imported.
    """
    from gangline.plugin.registry import installed

    with tempfile.TemporaryDirectory(prefix="gangline-installed-") as site:
        info = Path(site, f"{distribution.replace('-', '_')}-0.0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.0\n")
        (info / "entry_points.txt").write_text(f"[gangline.v1]\n{distribution} = {module}\n")
        entries = [site] if path is None else [site, str(path)]
        before, variable = list(sys.path), os.environ.get("PYTHONPATH")
        sys.path[:0] = entries
        os.environ["PYTHONPATH"] = os.pathsep.join([*entries, *([variable] if variable else [])])
        installed.cache_clear()
        try:
            for failure in installed().failures:
                if failure.distribution == distribution:
                    raise failure.error or ImportError(failure.why)
            yield
        finally:
            sys.path[:] = before
            if variable is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = variable
            installed.cache_clear()
