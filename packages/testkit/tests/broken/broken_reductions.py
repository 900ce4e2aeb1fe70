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
    """Multiplies the sum by a factor that differs by 1e-6 from rank to rank."""

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
    """Sums all buckets in the same scratch memory."""

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
    """Sends half of each gradient and keeps the other half in an attribute outside of its kept arrays."""

    def __init__(self, config, run):
        self.left = {}

    def reduce(self, bucket, comm):
        whole = bucket.flat + self.left.get(bucket.layout.size, 0)
        self.left[bucket.layout.size] = whole / 2
        return comm.start_all_reduce(whole / 2)

    def reduce_scatter(self, bucket, comm):
        return super(PlainSum, self).reduce_scatter(bucket, comm)


class Grows(Summed):
    """Returns one more array from each call of `get_array_shapes`."""

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
    """Its configuration claims to send -1 bytes."""


class GathersAll(Summed):
    """Sends all gradients to every rank, although its configuration counts the bytes of a ring."""

    def reduce(self, bucket, comm):
        every = comm.start_all_gather(bucket.flat)
        return Later(every, lambda rows: sum_rows(rows.view(comm.size, -1)))


class Swallows(Summed):
    """Replaces gradients that are not finite by zero."""

    def reduce(self, bucket, comm):
        return super().reduce(replace(bucket, flat=bucket.flat.nan_to_num(0, 0, 0)), comm)


class Hoards(Summed):
    """Keeps an array, although its configuration counts 0 kept numbers."""

    def get_array_shapes(self, layout):
        return {"last": (layout.size,)}


class Silent(AveragesRanks):
    """Differs from the exact sum, although its part is not marked as layout-dependent."""
