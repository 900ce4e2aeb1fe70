"""Detection of damaged JPEG and PNG files, because libjpeg decodes a damaged JPEG to wrong pixels and only warns.

PNG   checksum (CRC) of every chunk: any changed byte is detected
JPEG  segments, order of restart markers, end marker, and runs of zeros that no encoder writes. Entropy-coded data has
      no checksum: most changes of a few of its bytes are not detected. ITU-T T.81, annexes B, C and F
"""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import numpy as np

PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
ZEROS = 128  # minimum consecutive zero bytes that count as damage: they hold at least two blocks of 64 coefficients
_RESTART, _SCAN, _END, _INTERVAL, _TABLES = 0xD0, 0xDA, 0xD9, 0xDD, 0xC4
_SEQUENTIAL = (0xC0, 0xC1)  # frame types that code each block in one scan, with Huffman tables
_SEGMENTS = frozenset([*range(0xC0, 0xD0), *range(0xDA, 0xF0), 0xFE]) - {0xC8}  # markers followed by a length


def find_damage(content: bytes) -> str:
    """Return a description of the damage in the structure of a JPEG or PNG, or ""; always "" for other formats."""
    if content.startswith(PNG):
        return _find_png_damage(content)
    return _Jpeg(content).find_damage() if content.startswith(JPEG) else ""


def describe_beginning(content: bytes) -> str:
    """Return "" for a file that begins like a JPEG or PNG, else a sentence about its first bytes."""
    if content.startswith((PNG, JPEG)):
        return ""
    return f"Not a JPEG or PNG: the content begins with {content[:16]!r}." if content else "The image has 0 bytes."


def _find_png_damage(content: bytes) -> str:
    view, at = memoryview(content), len(PNG)
    while at + 12 <= len(content):
        kind, end = content[at + 4 : at + 8], at + 12 + int.from_bytes(content[at : at + 4])
        if end > len(content):
            break
        if crc32(view[at + 4 : end - 4]) != int.from_bytes(content[end - 4 : end]):
            return f"PNG: the checksum of chunk {kind!r} at byte {at} does not match its bytes."
        if kind == b"IEND":
            return ""
        at = end
    return f"PNG: the content ends at byte {len(content)}, within the chunk at byte {at} or before the last chunk."


class _Jpeg:
    def __init__(self, content: bytes) -> None:
        self.content, self.interval, self.sequential = content, 0, False
        self.first: dict[int, int] = {}  # AC Huffman table -> symbol of its first code, which is all zero bits
        array = np.frombuffer(content, np.uint8)
        # Within entropy-coded data FF00 is the byte FF, and FF may be repeated before a marker.
        self.markers = np.flatnonzero((array[:-1] == 0xFF) & (array[1:] != 0) & (array[1:] != 0xFF))

    def find_damage(self) -> str:
        content, at = self.content, 2
        while at + 1 < len(content):
            while content[at : at + 2] == b"\xff\xff":
                at += 1
            if content[at] != 0xFF:
                return f"JPEG: a marker is missing at byte {at}."
            code, at = content[at + 1 : at + 2], at + 2
            if code == bytes([_END]):
                return ""
            size = int.from_bytes(content[at : at + 2])
            if not code or code[0] not in _SEGMENTS or size < 2 or at + size > len(content):
                return f"JPEG: marker FF{code.hex().upper()} at byte {at - 2} is damaged or out of place."
            segment, at = content[at + 2 : at + size], at + size
            self._remember(code[0], segment)
            if code[0] == _SCAN:
                end, wrong = self._check_entropy_data(at)
                if wrong := wrong or self._find_zeros(segment, at, end):
                    return wrong
                at = end
        return f"JPEG: the content ends at byte {len(content)} without an end marker."

    def _remember(self, code: int, segment: bytes) -> None:
        if code == _INTERVAL:
            self.interval = int.from_bytes(segment[:2])
        elif code == _TABLES:
            while len(segment) > 17:
                if segment[0] >> 4:
                    self.first[segment[0] & 15] = segment[17]
                segment = segment[17 + sum(segment[1:17]) :]
        elif code in _SEGMENTS and code <= 0xCF and code != 0xCC:
            self.sequential = code in _SEQUENTIAL

    def _check_entropy_data(self, at: int) -> tuple[int, str]:
        """Return (offset of the first marker after the entropy-coded data at `at`, description of damage or "")."""
        index = 0
        for place in self._iterate_markers(at):
            code = self.content[place + 1]
            if not _RESTART <= code < _RESTART + 8:
                return place, ""
            if not self.interval or code != _RESTART + index:
                return place, f"JPEG: restart marker FF{code:02X} at byte {place} is out of order."
            index = (index + 1) % 8
        return len(self.content), ""

    def _iterate_markers(self, at: int) -> Iterator[int]:
        yield from self.markers[np.searchsorted(self.markers, at) :].tolist()

    def _find_zeros(self, scan: bytes, at: int, end: int) -> str:
        """Return a description of a run of zero bytes that no encoder writes, or "".

        Zero bytes decode to the first symbol of each Huffman table, again and again. If that symbol ends a block, the
        zeros are a flat area; otherwise each coefficient is the smallest of its category, which no image has in block
        after block.
        """
        tables = {self.first.get(scan[2 + 2 * one] & 15, 0) for one in range(scan[0]) if 2 + 2 * one < len(scan)}
        if not self.sequential or tables <= {0}:
            return ""
        place = self.content.find(bytes(ZEROS), at, end)
        return f"JPEG: {ZEROS} or more bytes from byte {place} are zeros." if place >= 0 else ""
