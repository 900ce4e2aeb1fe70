"""Checked reading of untrusted JSON, field by field, with errors that name the invalid field. Torch-free."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import xxhash

from gangline import UserError

CHECKSUM = "checksum"
_XXH3 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class JsonFields:
    """An object of a JSON document. Each `read_` method raises UserError with the object's location and the field."""

    content: Any
    place: str

    def explain_damage(self, key: str, why: str) -> UserError:
        value = self.content.get(key) if isinstance(self.content, dict) else self.content
        return UserError(f"{self.place} is damaged: {key} is {value!r:.60}.", f"{why[:1].upper()}{why[1:]}.")

    def read_text(self, key: str) -> str:
        value = self.content.get(key) if isinstance(self.content, dict) else None
        if not isinstance(value, str):
            raise self.explain_damage(key, "expected a string")
        return value

    def read_name(self, key: str) -> str:
        """Read the name of a file in the document's folder. Raises UserError for a path to another folder."""
        value = self.read_text(key)
        if not _is_name(value):
            raise self.explain_damage(key, "expected the name of a file next to the manifest")
        return value

    def read_names(self, key: str) -> list[str]:
        """Read a list of names of files in the document's folder. Raises UserError for a path to another folder."""
        values = self.read_list(key, str)
        if not all(map(_is_name, values)):
            raise self.explain_damage(key, "expected names of files next to the manifest")
        return values

    def read_number(self, key: str) -> int:
        value = self.content.get(key) if isinstance(self.content, dict) else None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
            raise self.explain_damage(key, "expected an integer of at least 0")
        return value

    def read_flag(self, key: str) -> bool:
        value = self.content.get(key) if isinstance(self.content, dict) else None
        if not isinstance(value, bool):
            raise self.explain_damage(key, "expected true or false")
        return value

    def read_optional(self, key: str, read: Any) -> Any:
        return None if isinstance(self.content, dict) and self.content.get(key) is None else read(key)

    def enter(self, key: str) -> JsonFields:
        return JsonFields(self.content.get(key) if isinstance(self.content, dict) else None, f"{self.place}, {key}")

    def read_list(self, key: str, kind: type) -> list[Any]:
        value = self.content.get(key) if isinstance(self.content, dict) else None
        if not isinstance(value, list) or any(type(one) is not kind for one in value):
            raise self.explain_damage(key, f"expected a list of {'integers' if kind is int else 'strings'}")
        return value

    def read_checksums(self, key: str) -> list[str]:
        """Read a list of XXH3-128 checksums in hex. Raises UserError for other text, because they become file names."""
        values: list[str] = self.read_list(key, str)
        if not all(map(_XXH3.fullmatch, values)):
            raise self.explain_damage(key, "expected checksums of 32 hex digits")
        return values

    def check(self) -> None:
        """Raise UserError if the document's checksum is missing or wrong (`add_checksum`)."""
        if not isinstance(self.content, dict) or self.content.get(CHECKSUM) != _compute_checksum(self.content):
            lacks = isinstance(self.content, dict) and CHECKSUM not in self.content
            raise UserError(
                f"{self.place} is damaged{', or of an older version' if lacks else ''}.",
                f"The field {CHECKSUM} is missing." if lacks else f"The field {CHECKSUM} does not match the content.",
                "Copy the file again from an intact store, or prepare the store again.",
            )


def add_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """Add the checksum of a document's content to the document: XXH3-128 of its JSON with sorted keys."""
    return {**content, CHECKSUM: _compute_checksum(json.loads(json.dumps(content)))}


def _compute_checksum(content: dict[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != CHECKSUM}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def _is_name(value: str) -> bool:
    return bool(value) and value not in (".", "..") and not set(value) & set("/\\\0")
