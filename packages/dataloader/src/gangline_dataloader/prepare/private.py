"""Personal data (PII) replaced by fixed words: email addresses, IP addresses and phone numbers.

The patterns are simple enough to check by eye, so they are neither complete nor free of mistakes: a version such as
1.2.3.4 looks like an IPv4 address, and only phone numbers with a + or an area code in brackets are recognised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ipaddress import ip_address

_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}(?![\w-])")
_IP = re.compile(r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7})(?![\w:]|\.\d)")
_PHONE = re.compile(
    r"(?<![\w+(])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?|\(\d{2,5}\)[ .-]?)\d{2,4}(?:[ .-]?\d{2,4}){1,4}(?!\w)"
)


def _is_ip(found: str) -> bool:
    """Return whether a match is an IPv4 or IPv6 address; `::` alone is not, as it is more often C++."""
    try:
        ip_address(found)
    except ValueError:
        return False
    return found != "::"


def _is_phone(found: str) -> bool:
    """Return whether a match has 7 to 15 digits: E.164 allows 15, and fewer than 7 are a price or a date."""
    return 7 <= sum(letter.isdigit() for letter in found) <= 15


def _is_accepted(found: str) -> bool:
    return True


# kind -> (pattern, check of a match, replacement)
KINDS: dict[str, tuple[re.Pattern[str], Callable[[str], bool], str]] = {
    "email": (_EMAIL, _is_accepted, "EMAIL_ADDRESS"),
    "ip": (_IP, _is_ip, "IP_ADDRESS"),
    "phone": (_PHONE, _is_phone, "PHONE_NUMBER"),
}


def replace_private(text: str, kinds: Sequence[str]) -> tuple[str, dict[str, int]]:
    """Replace personal data of these kinds; return the text and the number of replacements by kind."""
    counts: dict[str, int] = {}
    for kind in kinds:
        pattern, is_one, word = KINDS[kind]

        def put(
            found: re.Match[str], kind: str = kind, is_one: Callable[[str], bool] = is_one, word: str = word
        ) -> str:
            if not is_one(found[0]):
                return found[0]
            counts[kind] = counts.get(kind, 0) + 1
            return word

        text = pattern.sub(put, text)
    return text, counts
