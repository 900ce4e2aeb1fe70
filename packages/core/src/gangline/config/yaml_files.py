"""Safe reader of YAML that others may have written, with bounded work: no aliases, no deep nesting. Torch-free."""

from __future__ import annotations

from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast, but PyYAML may lack it
DEEPEST = 64  # maximum nesting of lists and mappings


class PlainDumper(yaml.SafeDumper):
    """YAML dumper that repeats a shared value instead of writing an alias, so that `load_yaml` can read it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def load_yaml(text: str) -> Any:
    """Return the single document of a YAML text. Raises yaml.YAMLError, also for text that `check_yaml` refuses."""
    check_yaml(text)
    try:
        return yaml.load(text, LOADER)
    except ValueError as error:  # a date such as 2001-99-99
        raise yaml.YAMLError(str(error)) from error


def check_yaml(text: str) -> None:
    """Raise yaml.YAMLError for an alias, and for nesting deeper than `DEEPEST`.

    A few nested aliases can expand to a billion values, and deep nesting overflows the stack of every reader.
    """
    depth = 0
    for event in yaml.parse(text, LOADER):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"line {line}: the alias *{event.anchor} is not supported; write its value there")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.YAMLError(f"line {line}: more than {DEEPEST} levels of nesting")
