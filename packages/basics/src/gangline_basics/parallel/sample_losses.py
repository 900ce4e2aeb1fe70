"""Losses of samples in global order, equal on every rank, for `Runtime.score` and `Runtime.evaluate`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gangline.batch import Batch
from gangline.comm.base import Comm
from gangline.comm.purpose import mark_traffic


def check_share(batches: Sequence[Batch], world: Comm, device: torch.device) -> None:
    """Raise ValueError, on every rank, unless all ranks pass the same number of batches, each of one sample."""
    odd = next((batch.shape[0] for batch in batches if batch.shape[0] != 1), 1)
    own_counts = torch.tensor([[len(batches), odd]], dtype=torch.int64, device=device)
    each = world.all_gather(own_counts).tolist()
    for rank, (count, rows) in zip(world.ranks, each, strict=True):
        if rows != 1:
            raise ValueError(
                f"score needs microbatches of one sample, and rank {rank} passed a microbatch of {rows} samples"
            )
        if count != each[0][0]:
            raise ValueError(
                f"score needs the same number of samples on each rank: rank {world.ranks[0]} passed {each[0][0]}, "
                f"and rank {rank} passed {count}. Fill up the smaller share with samples whose loss_mask is empty"
            )


@mark_traffic("loss")
def gather_in_order(
    losses: Sequence[Tensor],
    count: int,
    coordinate: tuple[int, int],
    comm: Comm,
    device: torch.device,
    losses_per_sample: int = 1,
) -> Tensor:
    """Return minus the loss of each sample, (width · count,) float64 in host memory, in order of data-parallel index.

    losses             0-d losses of this rank's `count` samples, or of their tokens on this rank; [] on a rank that
                       computes no loss
    coordinate         (index, width) of this rank among the data-parallel ranks
    comm               all ranks that compute losses; losses of different ranks for one sample are summed
    losses_per_sample  if more than 1, each loss has the shape (losses_per_sample,), and the result has the shape
                       (width · count, losses_per_sample)
    """
    summed = comm.all_reduce(-_place(losses, count, coordinate, device, losses_per_sample)).cpu()
    return summed if losses_per_sample == 1 else summed.view(-1, losses_per_sample)


@mark_traffic("loss")
def sum_evaluated(
    losses: Sequence[Tensor], count: int, tokens: Tensor, coordinate: tuple[int, int], comm: Comm, device: torch.device
) -> tuple[float, int]:
    """Return (loss sum, token count) of all ranks: each microbatch's loss is added in global order.

    So the sum has the same bits for any number of data ranks with microbatches of one size. Arguments as in
    `gather_in_order`, for `count` microbatches on every rank; tokens: token count of this rank, 0-d.
    """
    placed = _place(losses, count, coordinate, device)
    *each, token_count = comm.all_reduce(torch.cat((placed, tokens.double().view(1)))).tolist()
    total = 0.0
    for loss in each:  # not `sum`, which compensates rounding from Python 3.12 on
        total += loss
    return total, int(token_count)


def _place(
    losses: Sequence[Tensor], count: int, coordinate: tuple[int, int], device: torch.device, each: int = 1
) -> Tensor:
    """Return (width · count · each,) float64: this rank's losses at their indices, zeros elsewhere."""
    index, width = coordinate
    every = torch.zeros(width, count, each, dtype=torch.float64, device=device)
    if losses:
        every[index] = torch.stack([loss.double().view(each) for loss in losses])
    return every.flatten()
