"""What the configuration of a reduction of gradients says of bytes, for `explain` and the planner. Torch-free."""

from __future__ import annotations

from abc import ABC


class GradientSizes(ABC):  # noqa: B024  # each of its methods has a default
    """For a reduction that sends gradients as they are and keeps nothing."""

    def count_wire_bytes(self, itemsize: int) -> float:
        """Return the bytes on the wire for each gradient of `itemsize` bytes."""
        return itemsize

    def count_kept(self, size: int, ranks: int, scatters: bool) -> int:
        """Return how many numbers a rank keeps for a bucket of `size` gradients.

        ranks, scatters: as of `gangline.gradients.BucketLayout`.
        """
        return 0
