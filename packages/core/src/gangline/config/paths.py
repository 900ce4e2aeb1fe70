"""File paths in a configuration: a relative path becomes absolute, from the working directory. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from typing import Any

from gangline.config import validation
from gangline.config.schema import Run
from gangline.config.serial import to_dict
from gangline.plugin.registry import installed


def resolve_paths(run: Run) -> dict[str, Any]:
    """Return the run as plain data with absolute file paths and glob patterns (`PartConfig.file_options`).

    References to environment variables stay as written: each start of the run looks up the variables again.
    """
    content = to_dict(run)
    _resolve_options(("weights",), content["run"], "run", run.references)
    for place, config in run.iterate_parts():
        options = content
        for step in place.split("."):
            options = options[step]
        _resolve_options(config.file_options, options, place, run.references)
        for name in installed().find_part(config).part.opens:
            _resolve_options(getattr(config, name).file_options, options[name], f"{place}.{name}", run.references)
    for name, options in content["validate"]["sets"].items():
        _resolve_options(run.data.file_options, options or {}, f"{validation.PATH}.{name}", run.references)
    return content


def _resolve_options(names: Iterable[str], options: dict[str, Any], place: str, references: Container[str]) -> None:
    for name in names:
        if name in options and f"{place}.{name}" not in references:
            options[name] = _resolve_value(options[name])


def _resolve_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_resolve_value(item) for item in value]
    if isinstance(value, dict):
        return {name: _resolve_value(item) for name, item in value.items()}
    if not isinstance(value, str) or not value or value.startswith("~") or "://" in value:
        return value
    return os.path.abspath(value)
