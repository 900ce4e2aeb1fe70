"""Losses of samples, gathered from all ranks in global sample order."""

from __future__ import annotations

import pytest
import torch

from gangline.comm.solo import Solo
from gangline_basics.parallel.sample_losses import gather_in_order


@pytest.mark.parametrize("each", [1, 2, 3])
def test_losses_are_gathered_in_sample_order(each):
    losses = [torch.randn((each,) if each > 1 else ()) for _ in range(4)]
    found = gather_in_order(losses, 4, (1, 3), Solo("world"), torch.device("cpu"), each)
    assert found.dtype == torch.float64
    assert found.shape == ((12,) if each == 1 else (12, each))
    assert torch.equal(found[4:8], -torch.stack(losses).double())
    assert not found[:4].any()
    assert not found[8:].any()


@pytest.mark.parametrize("each", [1, 2])
def test_rank_without_samples_contributes_zeros(each):
    found = gather_in_order([], 4, (0, 2), Solo("world"), torch.device("cpu"), each)
    assert found.shape == ((8,) if each == 1 else (8, 2))
    assert not found.any()
