"""A command with verbs of its own, such as `gangline data prepare`: which one is meant, and the page of all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gangline.config.suggest import near
from gangline.errors import UserError


def usage_of(command: str, verbs: Mapping[str, str], more: str = "") -> str:
    """The page that lists them. verbs: each with a line about it. more: a paragraph to stand below."""
    width = max(map(len, verbs))
    lines = [f"  {verb:{width}} {text}" for verb, text in verbs.items()]
    below = [*([more] if more else []), f"gangline {command} VERB --help  says more."]
    return "\n".join([f"usage: gangline {command} VERB ...", "", *lines, "", *below])


def verb_of(command: str, verbs: Collection[str], argv: Sequence[str], usage: str) -> tuple[str, Sequence[str]] | None:
    """(the verb, what is behind it); None where help was asked for, and `usage` was printed.

    Raises UserError for a verb that does not exist.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage)
        return None
    verb, *rest = argv
    if verb not in verbs:
        raise UserError(f"there is no gangline {command} {verb}.", near(verb, verbs), f"Choices: {', '.join(verbs)}.")
    return verb, rest
