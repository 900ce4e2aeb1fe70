"""Target of an alert: URL of a webhook or shell command. The path of a URL is often secret: messages omit it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

URL = ("http://", "https://")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_WITH_PATH = re.compile(r"https?://(?:[^\s/@'\"]*@|[^\s/'\"]+[/?][^\s'\"]+)", re.IGNORECASE)


def is_url(target: object) -> bool:
    """Return whether the target is an http or https URL; otherwise it is a shell command."""
    return str(target).lower().startswith(URL)


def name_target(target: str) -> str:
    """Return the target without secrets, for messages: scheme and host of a URL, or the first word of a command."""
    if not is_url(target):
        return (target.split() or [""])[0]
    try:
        parts = urlsplit(target)
        return f"{parts.scheme}://{parts.hostname}"
    except ValueError:
        return "a URL"


def explain_malformed(target: str) -> str:
    """Return why a POST to the target is impossible; "" for a valid URL and for a command."""
    if not is_url(target):
        scheme = _SCHEME.match(target)
        return f"{scheme[0]} is not supported, only http:// and https://" if scheme else ""
    try:
        parts = urlsplit(target)
        if not parts.hostname:
            return "the host is missing"
        _ = parts.port  # raises ValueError if the port is not a number
    except ValueError as error:
        return str(error)
    if bad := re.search(r"[^\x21-\x7e]", target):
        return f"the character {bad[0]!r} is not allowed in a URL"
    return ""


def tells_a_secret(target: str) -> bool:
    """Return whether the target contains a URL with a path, a query or a user: a reader could post to it too."""
    return _WITH_PATH.search(target) is not None
