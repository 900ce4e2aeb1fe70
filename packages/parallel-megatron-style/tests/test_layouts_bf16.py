"""bfloat16 matmuls with float32 master weights: layouts differ from one process only by rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from layout_ranks import Composition, Layouts

from gangline_testkit import StrategySuite
from gangline_testkit.compare import assert_number_close

LAYERS = 2
ROUNDING = 2.0**-8  # half the spacing of bfloat16 numbers at 1: the relative error of one rounding to nearest

# A gradient is the result of a chain of operations that each round to bfloat16. The longest path through a block has
# eleven: norm, q/k/v, rotation, attention, wo, sum with the residual; norm, gate and up, their product, w_down, sum
# with the residual. The backward pass also has eleven, and five sums of the gradients that reach one input (two for q,
# k and v, one for gate and up, one for each residual). Before and after the blocks there are lookup, norm and logits,
# forward and backward.
CHAIN = LAYERS * (11 + 11 + 5) + 6
# n roundings of independent sign add up to about sqrt(n) times one rounding (Higham and Mary, SIAM J. Sci. Comput. 41,
# 2019). Both runs round. The bound is relative to the norm of a full gradient, where errors of elements average out.
BOUND = ROUNDING * math.sqrt(2 * CHAIN)


class Alone(StrategySuite):
    """Suite that trains in one process and groups microbatches as two data ranks would."""

    choice = "parallel=single"


@pytest.mark.parametrize("on", ["pp=2 dp_shard=2 tp=2 zero=3", "cp=2 tp=2 sequence_parallel=false"])
def test_bf16_gradients_differ_only_by_rounding(on):
    suite, composition = Layouts(), Composition(on, f"layers={LAYERS}", dtype=torch.float32, steps=1)
    job = replace(suite.job_of(composition), compute=torch.bfloat16)
    one = Alone().make_job(replace(composition.layout, world=1, settings=()), composition.scenario)
    (alone,) = suite.train_job(replace(one, compute=torch.bfloat16))
    want = {name: gradient for name, _, gradient in alone.steps[0].held}
    ranks = suite.train_job(job)
    got = suite.assemble_shards([of_rank.steps[0].held for of_rank in ranks], want)
    assert_number_close("loss", ranks[0].steps[0].loss_sum, alone.steps[0].loss_sum, BOUND)
    assert_number_close("norm", ranks[0].steps[0].norm, alone.steps[0].norm, BOUND)
    apart = {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in want}
    assert max(apart.values()) < BOUND, apart
    assert max(apart.values()) > 0, "the matmuls were not rounded to bfloat16"
