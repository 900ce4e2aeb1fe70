"""Where a run came from: code, versions, machine and command. Never a value of the environment, never a secret."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gangline.discovery import version_of
from gangline.redaction import redact


def describe(argv: Sequence[str], changed: Mapping[str, Any]) -> dict[str, Any]:
    """One start of a run: when, how, with which code and on what machine."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [redact(word) for word in argv],
        "changed": dict(changed),
        "code": {"gangline": git(Path(__file__).parent), "here": git(Path.cwd())},
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {"node": platform.node(), "platform": platform.platform(), "cpus": os.cpu_count()},
        "executable": sys.executable,
    }


def git(folder: Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the work tree that `folder` lies in, or None where there is none (or no git)."""
    try:
        commit = _ask(folder, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_ask(folder, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def source_of(module: str) -> str:
    """Names what the package of a module is made of: other letters where a line of its Python differs.

    Nothing is imported; "" where it is not found or cannot be read.
    """
    digest = blake2b(digest_size=8)
    try:
        found = find_spec(module.partition(".")[0])
        folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
        files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
        if found and found.origin and not folders:
            files = [Path(found.origin)]
        for path in files:
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode() + content)
    except (OSError, ValueError):
        return ""
    return digest.hexdigest() if files else ""


def _ask(folder: Path, *words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    """Of the packages that compute, from their metadata, so that nothing is imported."""
    found = {name: version_of(name) for name in ("gangline", "torch", "numpy", "hydra-core", "omegaconf")}
    return {name: version for name, version in found.items() if version}
