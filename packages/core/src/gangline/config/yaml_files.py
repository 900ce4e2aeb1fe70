"""Read YAML that somebody else may have written, with bounded work: no aliases, no deep nesting. Torch-free."""

from __future__ import annotations

from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has it
DEEPEST = 64  # levels of lists and mappings


class PlainDumper(yaml.SafeDumper):
    """Writes a value that comes twice out twice, so that `load_yaml` reads it back."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def load_yaml(text: str) -> Any:
    """The one document of a text. Raises yaml.YAMLError, also for what `check_yaml` refuses."""
    check_yaml(text)
    try:
        return yaml.load(text, LOADER)
    except ValueError as error:  # a date such as 2001-99-99
        raise yaml.YAMLError(str(error)) from error


def check_yaml(text: str) -> None:
    """Raise yaml.YAMLError for an alias, and for more than `DEEPEST` levels.

    A few nested aliases stand for a billion values, and deep nesting overflows the stack of every reader.
    """
    depth = 0
    for event in yaml.parse(text, LOADER):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"line {line}: the alias *{event.anchor} is not supported; write its value there")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.YAMLError(f"line {line}: more than {DEEPEST} levels of nesting")
