"""Redaction of secrets in the run directory: options with secrets are refused, command lines hide them. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gangline.config.serial import ENVIRONMENT
from gangline.errors import UserError

HIDDEN = "***"
_NAMES = (
    r"((api|access|secret|private)[_-]?key|(api|access|auth)?token|secret|password|passwd|pwd|passphrase|bearer|"
    r"credentials?)"
)
_SECRET = re.compile(rf"(^|[_.-]){_NAMES}$", re.IGNORECASE)
_MAYBE = re.compile(r"([_.-](key|auth)|^auth)$", re.IGNORECASE)  # only with a random-looking value: not sort_key
_RANDOM = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[\w+/=-]{16,}")
# Patterns of secrets in the value of any option; the group `secret` is hidden.
_FORMS = [
    re.compile(r"\w+://[^/\s:@]*:(?P<secret>[^/\s@]*[^/\s@\0][^/\s@]*)@"),  # user:password@host
    re.compile(r"\w+://(?P<secret>(?=[^/\s@]*\d)[^/\s:@\0]{16,})@"),  # token@host
    re.compile(rf"[?&;]([\w-]*[_-])?({_NAMES}|key|sig|signature)=(?P<secret>[^&\s\0$'\"]+)", re.IGNORECASE),
    re.compile(r"\b(?P<secret>hf_\w{16,}|AKIA[0-9A-Z]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,})"),
    re.compile(r"\b(?P<secret>sk-((proj|ant|live|test)-)?\w{16,}|xox[abprs]-[\w-]{10,}|eyJ[\w-]+\.eyJ[\w-]+\.[\w-]+)"),
    re.compile(  # shell assignment such as API_KEY=...; a value that is a path or a variable is not a secret
        r"\b([A-Z0-9_]*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE)|password|passwd|passphrase|api_?key)="
        r"(?P<secret>[\"']?[^\s\"'$`\0/~.][^\s\"']*)"
    ),
    re.compile(r"\bBearer\s+(?P<secret>[\w.~+/-]{12,}=*)", re.IGNORECASE),
    re.compile(r"(?<!\S)(-u|--user)[=\s]\s*[\"']?[^\s:\"'/]+:(?P<secret>(?!\d+(\s|$))[^\s\"'$\0/][^\s\"'\0]*)"),
    re.compile(r"--(api-?key|token|password|passwd|secret)[=\s]\s*[\"']?(?P<secret>[^\s\"'$`\0/~.-][^\s\"']*)"),
]
_IN_MAPPING = re.compile(rf"(?<![^\W_]){_NAMES}[\"']?\s*:\s*[\"']?(?P<secret>[^\s,}}\"'\0][^,}}\"']*)", re.IGNORECASE)
_IN_LIST = (
    "Leave out the secret here: programs and stores read their credentials from the environment.",
    "A shell command can also read a file that only you can read:  . FILE   (chmod 600 FILE)",
)


def looks_secret(key: str) -> bool:
    """Return whether the name of an option marks its value as secret (api_key, token, password)."""
    return _SECRET.search(key) is not None


def refuse_secrets(content: Mapping[str, Any], prefix: str = "") -> None:
    """Raise UserError if a configuration that is about to be written contains a secret in plain text.

    A secret is text under an option with a secret name, or text that looks like a secret, such as a password in a URL.
    References to the environment (`${oc.env:...}`) are not secrets.
    """
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            refuse_secrets(value, f"{path}.")
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, Mapping | list):
                    refuse_secrets({key: item} if isinstance(item, list) else item, prefix)
                elif _is_exposed(path, item):
                    raise _explain_refusal(path, *_IN_LIST)
        elif _is_exposed(path, value):
            reference = f"'{path}=${{oc.env:{str(key).upper()}}}'"
            raise _explain_refusal(
                path, "Set the secret in the environment and type a reference, which is written instead:", reference
            )


def _explain_refusal(path: str, *fix: str) -> UserError:
    return UserError(f"{path} contains a secret, and all options are written to the run directory.", *fix)


def _is_exposed(path: str, value: Any) -> bool:
    """Return whether a value is a secret text, by the option's name or by the text's form."""
    return isinstance(value, str) and (
        _is_named_secret(path, value) or next(_iterate_secrets(value, _FORMS), None) is not None
    )


def _is_named_secret(option: str, text: str) -> bool:
    """Return whether the name of an option marks its text as secret; a reference to the environment is not a secret."""
    literal = ENVIRONMENT.sub(lambda found: (found[2] or "").strip(), text)
    if _MAYBE.search(option) and not looks_secret(option):
        return _RANDOM.fullmatch(literal) is not None
    return looks_secret(option) and bool(literal)


def redact(word: str) -> str:
    """Return a command-line argument without secrets: values of options with a secret name, passwords in URLs."""
    key, _, value = word.partition("=")
    if _is_named_secret(key.strip("+~'\" "), value.strip("'\"")):
        return f"{key}={HIDDEN}"
    hidden = {place for span in _iterate_secrets(word, [*_FORMS, _IN_MAPPING]) for place in range(*span)}
    signs = [sign if place not in hidden else "" if place - 1 in hidden else HIDDEN for place, sign in enumerate(word)]
    return "".join(signs)


def _iterate_secrets(text: str, forms: Sequence[re.Pattern[str]]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each secret in a text; ignore references to the environment."""
    masked = ENVIRONMENT.sub(lambda found: "\0" * len(found[0]), text)
    for form in forms:
        yield from (match.span("secret") for match in form.finditer(masked))
