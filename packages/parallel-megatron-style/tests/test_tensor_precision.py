"""Modules with a custom matmul receive the precision once, with and without tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gangline.comm.solo import Solo
from gangline.plan import Plan
from gangline_basics.parallel.prepare import set_matmuls
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.tensor.apply import cut_modules

PLAN = Plan("embed", "blocks", "head", 1)


class Own(nn.Module):
    told = None

    def set_precision(self, precision):
        assert self.told is None, "told twice"
        self.told = precision


@pytest.mark.parametrize("cut", [False, True])
def test_module_with_own_matmul_gets_precision_once(cut):
    model, precision = nn.Sequential(Own()), Plain(torch.float32, torch.float32)
    if cut:
        cut_modules(model, PLAN, Solo("tp", 0), precision, sequence_parallel=False, first_rows={}, losses={})
    else:
        set_matmuls(model, PLAN, precision)
    assert model[0].told is precision
