"""What the configuration of a reduction of gradients says of bytes, for `explain` and the planner. Torch-free."""

from __future__ import annotations

from abc import ABC


def count_ring_bytes(nbytes: float, ranks: int, scatters: bool) -> float:
    """Return what each rank of a ring sends to sum a bucket of `nbytes` bytes: all of it, or where it scatters a range.

    An all-to-all of ranges and an all-gather of their sums send the same.
    """
    return (1 if scatters else 2) * nbytes * (ranks - 1) / ranks


class GradientSizes(ABC):  # noqa: B024  # each of its methods has a default
    """For a reduction that sends gradients as they are and keeps nothing.

    size, ranks, scatters: as of `gangline.gradients.BucketLayout`.
    """

    def count_sent(self, size: int, ranks: int, scatters: bool, itemsize: int) -> float:
        """Return the bytes that a rank sends to sum a bucket of `size` gradients of `itemsize` bytes.

        By default those of a ring. A rank that gathers what all others have, `b` bytes of each, sends b (ranks - 1).
        """
        return count_ring_bytes(size * itemsize, ranks, scatters)

    def count_kept(self, size: int, ranks: int, scatters: bool) -> int:
        """Return how many numbers a rank keeps for a bucket of `size` gradients: those of `GradientReduction.arrays`.

        One that keeps some is refused beside a precision whose steps may overflow (`PrecisionConfig.finds_scale`).
        """
        return 0
