"""Temporary installation of a plugin, to test the kit and to try out a part.

The plugin gets real metadata on `sys.path` and is found, composed and listed like any other.
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
    """Make `module` the entry module of an installed `distribution` in the block; `path` is where to import it from.

    Raises what the import of the module raises.
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
