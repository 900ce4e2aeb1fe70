"""Bytes that a gradient reduction sends and stores, computed from its options to plan layouts. Torch-free."""

from __future__ import annotations

from abc import ABC


def count_ring_bytes(nbytes: float, ranks: int, scatters: bool) -> float:
    """Return the bytes that each rank of a ring sends to all-reduce (if `scatters`, reduce-scatter) `nbytes` bytes.

    An all-to-all of ranges followed by an all-gather of their sums sends as much as the all-reduce.
    """
    return (1 if scatters else 2) * nbytes * (ranks - 1) / ranks


class GradientSizes(ABC):  # noqa: B024  # each of its methods has a default
    """Sizes of a gradient reduction; the defaults suit a reduction that sends gradients unchanged and stores nothing.

    size, ranks, scatters: as in `gangline.gradients.BucketLayout`.
    """

    def count_sent(self, size: int, ranks: int, scatters: bool, itemsize: int) -> float:
        """Return the bytes that a rank sends to sum a bucket of `size` gradients of `itemsize` bytes.

        The default assumes a ring. A rank that all-gathers b bytes from each rank sends b (ranks - 1) bytes.
        """
        return count_ring_bytes(size * itemsize, ranks, scatters)

    def count_state(self, size: int, ranks: int, scatters: bool) -> int:
        """Return how many numbers a rank stores per bucket of `size` gradients (`GradientReduction.get_array_shapes`).

        If it is not 0, a precision whose steps may overflow (`PrecisionConfig.finds_scale`) is refused.
        """
        return 0
