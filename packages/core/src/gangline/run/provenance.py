"""Provenance of a run: code, versions, machine and command, without environment values or secrets."""

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

from gangline.plugin.discovery import find_version
from gangline.run.redaction import redact


def describe(argv: Sequence[str], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of one start of a run: time, command, code, versions and machine."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [redact(word) for word in argv],
        "changed": dict(changed),
        "code": {"gangline": read_git(Path(__file__).parent), "here": read_git(Path.cwd())},
        "versions": {"python": platform.python_version(), **_find_versions()},
        "machine": {"node": platform.node(), "platform": platform.platform(), "cpus": os.cpu_count()},
        "executable": sys.executable,
    }


def read_git(folder: Path) -> dict[str, Any] | None:
    """Return {"commit", "dirty"} of the work tree around `folder`; None without a work tree or git.

    Commands in the work tree's git configuration are not run, because the author of an archive may control them.
    """
    try:
        commit = _ask(folder, "rev-parse", "HEAD")
        words = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
        return {"commit": commit, "dirty": bool(_ask(folder, *words, without=_list_filters(folder)))}
    except (OSError, subprocess.SubprocessError):
        return None


def identify_source(module: str) -> str:
    """Return a hash of the Python files of a module's package; "" if the package is not found or cannot be read.

    Does not import the package.
    """
    digest = blake2b(digest_size=8)
    try:
        spec = find_spec(module.partition(".")[0])
        folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
        files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
        if spec and spec.origin and not folders:
            files = [Path(spec.origin)]
        for path in files:
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode() + content)
    except (OSError, ValueError):
        return ""
    return digest.hexdigest() if files else ""


def _ask(folder: Path, *words: str, without: Sequence[str] = ()) -> str:
    """Return the output of a git command. without: names of git options to set to empty."""
    settings = {"GIT_CONFIG_COUNT": str(len(without)), "GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none"}
    for number, name in enumerate(without):
        settings |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": ""}
    command = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "-C", str(folder), *words]
    environment = {**os.environ, **settings}
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, env=environment)
    return process.stdout.strip()


def _list_filters(folder: Path) -> list[str]:
    """Return the options in the work tree's own configuration that define filters, which `git status` would run."""
    try:
        words = ("config", "--show-scope", "--null", "--name-only", "--get-regexp", r"^filter\.")
        scopes_and_names = _ask(folder, *words).split("\0")
    except subprocess.CalledProcessError:  # the tree has no filters
        return []
    pairs = zip(scopes_and_names[::2], scopes_and_names[1::2], strict=False)
    return [name for scope, name in pairs if scope not in ("system", "global")]


def _find_versions() -> dict[str, str]:
    """Return the versions of the main packages from their metadata, without an import."""
    versions = {name: find_version(name) for name in ("gangline-core", "torch", "numpy", "hydra-core", "omegaconf")}
    return {name: version for name, version in versions.items() if version}
