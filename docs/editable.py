"""Imitate `pip install -e DIRECTORY` for the examples of the documentation: write the metadata, and link the modules.

Needs no build backend and no network, and does not change the environment of the tests.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def install(arguments: list[str], site: str) -> None:
    """Make the project in a directory look installed to every process that has `site` on its module path."""
    if len(arguments) != 3 or arguments[:2] != ["install", "-e"]:
        sys.exit(f"this pip knows  install -e DIRECTORY  and not  {' '.join(arguments)}")
    directory = Path(arguments[2]).resolve()
    project = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = Path(site, f"{name.replace('-', '_')}-{version}.dist-info")
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    root = directory / "src" if (directory / "src").is_dir() else directory
    modules = [path for path in sorted(root.iterdir()) if path.suffix == ".py" or (path / "__init__.py").exists()]
    if len(modules) > 1 and root == directory:  # pip's default backend refuses this too; other backends would skip one
        sys.exit(f"multiple top-level modules discovered in a flat layout: {', '.join(path.name for path in modules)}")
    for module in modules:
        link = Path(site, module.name)
        if not link.exists():
            link.symlink_to(module)
    print(f"Successfully installed {name}-{version}")
