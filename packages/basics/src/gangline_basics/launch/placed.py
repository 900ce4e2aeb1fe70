"""Addresses of nodes, ordered by their positions in the network."""

from __future__ import annotations

import re


class PlacedAddress(str):
    """A node's address, ordered by the node's path in the network.

    torch's rendezvous assigns ranks in the order of addresses, so neighbouring ranks are neighbours in the network.
    """

    place: str

    def __new__(cls, address: str, place: str = "") -> PlacedAddress:
        placed_address = super().__new__(cls, address)
        placed_address.place = place
        return placed_address

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True and self.place == getattr(other, "place", "")

    def __hash__(self) -> int:
        return hash((str(self), self.place))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return _order(self) < _order(other)

    def __le__(self, other: str) -> bool:
        return _order(self) <= _order(other)

    def __gt__(self, other: str) -> bool:
        return _order(self) > _order(other)

    def __ge__(self, other: str) -> bool:
        return _order(self) >= _order(other)

    def __reduce__(self) -> tuple:
        return PlacedAddress, (str(self), self.place)


def _order(address: str) -> tuple[list[tuple[int, str]], str]:
    return make_natural_key(getattr(address, "place", "")), str(address)


def make_natural_key(text: str) -> list[tuple[int, str]]:
    """Return a sort key by which rack9 comes before rack10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
