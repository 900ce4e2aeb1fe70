"""Assignment of blocks to pipeline stages: the slowest stage is as fast as any assignment allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, strategies as st

from gangline.config.defaults import build_default_run
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.model.tree import Node
from gangline_basics.launch.config import LocalLaunch
from gangline_parallel_megatron_style.config import Pp
from gangline_parallel_megatron_style.layout.alike import count_forward_flops
from gangline_parallel_megatron_style.layout.stages import balance, partition


def slowest(sizes, blocks, first, last) -> list[float]:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    times = [sum(blocks[a:b]) for a, b in pairwise(bounds)]
    times[0] += first
    times[-1] += last
    return times


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_pipeline_stage_balance_is_optimal(blocks, data):
    stages = data.draw(st.integers(1, len(blocks)))
    first, last = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    found = balance(blocks, stages, first, last)
    assert (len(found), sum(found)) == (stages, len(blocks))
    assert min(found) >= 1

    def rank(sizes):
        times = slowest(sizes, blocks, first, last)
        return max(times), sum(time * time for time in times)

    divisions = ((0, *cuts, len(blocks)) for cuts in combinations(range(1, len(blocks)), stages - 1))
    assert rank(found) == min(rank([b - a for a, b in pairwise(cuts)]) for cuts in divisions)


@pytest.mark.parametrize(
    ("count", "stages", "first", "last", "sizes"),
    [
        (4, 2, 0, 0, [2, 2]),
        (5, 2, 0, 0, [2, 3]),  # the first stage stores the most activations
        (4, 2, 0, 2, [3, 1]),
        (126, 16, 1, 1, [7, *[8] * 14, 7]),  # Llama 3 405B (arXiv 2407.21783, section 3.3.2)
    ],
)
def test_balance_gives_known_stage_sizes(count, stages, first, last, sizes):
    assert balance([1] * count, stages, first, last) == sizes


def test_balance_accepts_measured_costs():
    assert balance([0.5, 0.5, 0.5, 2.0], 2) == [3, 1]


@pytest.mark.parametrize("stages", [0, 4])
def test_every_stage_needs_a_block(stages):
    with pytest.raises(ValueError, match=f"3 blocks cannot be divided into {stages} stages"):
        balance([1, 1, 1], stages)


def of(config: Pp, pp: int, **model) -> list[range]:
    run = build_default_run(parallel=config, launch=LocalLaunch(processes=pp))
    for name, value in model.items():
        setattr(run.model, name, value)
    tree, plan = compose_model(run)
    return partition(config, Mesh.of({"pp": pp}), tree, plan, run.batch.sequence_length)


def test_large_vocabulary_shrinks_the_last_stage():
    sizes = [len(blocks) for blocks in of(Pp(), 2, layers=8, vocab_size=20_000)]
    tree, _ = compose_model(build_default_run())
    assert count_forward_flops(tree.head, 128) < count_forward_flops(tree.blocks[0], 128)
    assert [len(blocks) for blocks in of(Pp(), 2, layers=8)] == [4, 4]
    assert sizes == [7, 1]


def test_blocks_of_unknown_cost_count_equally():
    tree, plan = compose_model(build_default_run())
    tree = replace(tree, blocks=(Silent(),) * 4)
    assert partition(Pp(), Mesh.of({"pp": 2}), tree, plan, 128) == [range(2), range(2, 4)]


@dataclass(frozen=True, kw_only=True)
class Silent(Node):
    """Third-party block without shapes."""


def test_stages_follow_user_sizes_and_chunks():
    assert of(Pp(stages=[1, 3]), 2) == [range(0, 1), range(1, 4)]
    assert of(Pp(schedule="interleaved_1f1b"), 2) == [range(i, i + 1) for i in range(4)]
    assert of(Pp(schedule="zb_v"), 1) == [range(4)]
