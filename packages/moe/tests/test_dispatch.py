"""Expert parallelism dispatch: bit-identical to one process that has all rows, with the minimum bytes sent."""

from __future__ import annotations

import dispatch_ranks as ranks
import pytest
import torch

from gangline_testkit.pool import get_pool

MANY = -1  # more experts per rank than separate messages allow: rows travel together and are regrouped


@pytest.mark.parametrize(
    ("world", "dtype", "skew", "ranks_per_node"),
    [
        (2, torch.float32, 0.0, None),
        (4, torch.float32, 0.0, None),
        (4, torch.float64, 0.0, None),
        (4, torch.float32, 9.0, None),
        (4, torch.float32, 0.0, 2),
        (4, torch.float64, 9.0, 2),
        (8, torch.float32, 0.0, 2),
        (8, torch.float32, 0.0, 4),
        (2, torch.float32, 0.0, MANY),
    ],
)
def test_dispatch_matches_one_process_bitwise(world, dtype, skew, ranks_per_node):
    """Compare outputs and the gradients of inputs, router logits and expert weights."""
    of_ranks = get_pool(world).run(ranks.on_ranks, dtype, skew, ranks_per_node)
    want = get_pool(1).run(ranks.alone, dtype, skew, world)[0]
    for name in want:
        got = torch.cat([found[name] for found in of_ranks])
        assert torch.equal(got, want[name]), f"{name}: {float((got - want[name]).abs().max()):.2g} apart"


@pytest.mark.parametrize(("world", "experts"), [(2, 8), (4, 8), (8, 8), (2, 32)])
def test_dispatch_sends_only_rows_for_other_ranks(world, experts):
    for rows, counts, least in get_pool(world).run(ranks.bytes_sent, 40, 16, experts):
        assert rows == least
        assert counts == 8 * (world - 1) * (experts // world)
