"""Gradient reductions with one fault each."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from gangline.comm.ordered import Later, sum_rows
from gangline_basics.gradients.plain import PlainSum


class Summed(PlainSum):
    def __init__(self, config, run):
        pass


class Apart(Summed):
    """A little more on every other rank."""

    def reduce(self, bucket, comm):
        return Later(super().reduce(bucket, comm), lambda total: total * (1 + 1e-6 * comm.index))


class AveragesRanks(Summed):
    def reduce(self, bucket, comm):
        return Later(super().reduce(bucket, comm), lambda total: total / comm.size)


class WrongRange(Summed):
    def reduce_scatter(self, bucket, comm):
        length = bucket.layout.size // comm.size
        return Later(self.reduce(bucket, comm), lambda total: total[:length].clone())


class OneScratch(Summed):
    """All buckets share the memory that the sum is made in."""

    def __init__(self, config, run):
        self.scratch = torch.zeros(1 << 12, dtype=torch.float64)

    def reduce(self, bucket, comm):
        self.scratch[: bucket.layout.size] = bucket.flat
        summed = self.scratch[: bucket.layout.size]
        comm.all_reduce(summed)
        return Later(comm.start_all_reduce(bucket.flat.new_zeros(1)), lambda _: summed.to(bucket.flat.dtype))

    def reduce_scatter(self, bucket, comm):
        length = bucket.layout.size // comm.size
        own = slice(comm.index * length, (comm.index + 1) * length)
        return Later(self.reduce(bucket, comm), lambda total: total[own])


class Forgets(Summed):
    """Half of the gradients, and of what it kept in memory of its own."""

    def __init__(self, config, run):
        self.left = {}

    def reduce(self, bucket, comm):
        whole = bucket.flat + self.left.get(bucket.layout.size, 0)
        self.left[bucket.layout.size] = whole / 2
        return comm.start_all_reduce(whole / 2)

    def reduce_scatter(self, bucket, comm):
        return super(PlainSum, self).reduce_scatter(bucket, comm)


class Grows(Summed):
    """One more array each time that it is asked."""

    def __init__(self, config, run):
        self.asked = 0

    def get_array_shapes(self, layout):
        self.asked += 1
        return {f"error-{number}": (layout.size,) for number in range(self.asked)}


class Dice(Summed):
    def reduce(self, bucket, comm):
        noise = comm.broadcast(torch.tensor([1 + 1e-4 * (time.monotonic_ns() % 1000)]), 0)
        return Later(super().reduce(bucket, comm), lambda total: total * noise.to(total))


class Negative(Summed):
    """Sends fewer bytes than none."""


class GathersAll(Summed):
    """Says what a ring sends, and sends all of it to each rank."""

    def reduce(self, bucket, comm):
        every = comm.start_all_gather(bucket.flat)
        return Later(every, lambda rows: sum_rows(rows.view(comm.size, -1)))


class Swallows(Summed):
    """Zero in place of what is not finite."""

    def reduce(self, bucket, comm):
        return super().reduce(replace(bucket, flat=bucket.flat.nan_to_num(0, 0, 0)), comm)


class Hoards(Summed):
    """Says that it keeps nothing."""

    def get_array_shapes(self, layout):
        return {"last": (layout.size,)}


class Silent(AveragesRanks):
    """Says that it is far off, and not why."""
