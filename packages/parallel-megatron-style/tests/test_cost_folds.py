"""Closed forms of modules on a fold: traffic, gradients, state and activation bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from gangline.config import RunSection
from gangline.config.defaults import build_default_run
from gangline.config.sections import Recompute
from gangline.explain.topology import Topology
from gangline.mesh import Mesh
from gangline.model.local_sizes import CommVolume, LocalSizes
from gangline.model.tree import Node, Shape
from gangline.plan import Fold, ShardRule
from gangline_basics.explain.activations import count_node, count_norm_bytes
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.decoder_nodes import NormNode
from gangline_parallel_megatron_style.config import ThreeD
from gangline_parallel_megatron_style.cost import activations, memory, tensor_traffic, timing, traffic
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.links import BESIDE, find_slowest_tier

MODEL = DecoderConfig(vocab_size=64, dim=32, layers=2, heads=4, ffn_dim=48)
LANES, WIDTH = 4, 64


@dataclass(frozen=True, kw_only=True)
class LanesNode(Node):
    """Node of a norm and a stack of matrices on the fold `lane`."""

    module: ClassVar[str] = "nowhere:Lanes"
    dim: int
    norm: NormNode
    lanes: int = LANES

    def get_shapes(self) -> dict[str, Shape]:
        return {"w": (self.lanes, WIDTH, self.dim)} if self.lanes else {}

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        return sizes.tokens * 100 + sizes.inner_tokens * sizes.itemsize + sizes.master_itemsize

    def list_volumes(self, sizes: LocalSizes) -> tuple[CommVolume, ...]:
        ranks = sizes.size("lane")
        if ranks == 1:
            return ()
        each = sizes.tokens * self.dim * sizes.itemsize * (ranks - 1) // ranks
        return (
            CommVolume(fold="lane", what="forth and back", forward=(2, 2 * each), backward=(1, each)),
            CommVolume(fold="lane", what="nearby", forward=(1, each), backward=(0, 0), among=2),
        )


class SilentNode(LanesNode):
    count_activation_bytes = Node.count_activation_bytes


def case_of(
    out_of: tuple[str, ...] = ("dp_shard",), size: int = 2, recompute: str = "none", lanes: int = LANES, **settings
) -> Case:
    """Return the case of a small decoder whose second feed-forward is a `LanesNode`."""
    axes = {name: settings.pop(name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if name in settings}
    precision = settings.pop("precision", "bf16")
    run = build_default_run(
        parallel=ThreeD(**settings),
        model=MODEL,
        precision=precision,
        run=RunSection(recompute=Recompute(recompute)),
        batch={"global_size": 16, "micro_size": 1, "sequence_length": 16},
    )
    case = Case.of(run, Mesh.of(axes))
    node = LanesNode(dim=32, norm=NormNode(dim=32), lanes=lanes)
    first, second = case.tree.blocks
    tree = replace(case.tree, blocks=(first, replace(second, feed_forward=node)))
    rule, fold = ShardRule("blocks.*.feed_forward.w", 0, "lane"), Fold("lane", size, out_of)
    return replace(case, tree=tree, plan=case.plan.extend(sharding=(rule,), folds=(fold,)))


def sent(case: Case) -> dict[tuple[str, str], tuple[int, int]]:
    return {(sent.axes[0], sent.purpose): (sent.calls, sent.bytes) for sent in traffic.list_sent(case, 0)}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_predicted_fold_traffic_matches_module_bytes(recompute):
    case = case_of(dp_shard=4, recompute=recompute)
    each, there = 16 * 32 * 2 // 2, 2 if recompute == "full" else 1
    found = sent(case)
    assert found["lane", "forth and back"] == (4 * (2 * there + 1), 4 * (2 * there + 1) * each)
    assert found["lane", "nearby"] == (4 * there, 4 * there * each)


def test_fold_of_one_rank_sends_no_bytes():
    assert not any(axis.endswith("lane") for axis, _ in sent(case_of(dp_shard=1)))
    assert not any(axis.endswith("lane") for axis, _ in sent(case_of(size=1, dp_shard=4)))


STACK = LANES * WIDTH * 32


@pytest.mark.parametrize(
    ("axes", "out_of", "shards", "copies"),
    [
        ({"dp_shard": 4}, ("dp_shard",), 2, ()),
        ({"dp_shard": 2}, ("dp_shard",), 1, ()),
        ({"dp_shard": 4, "cp": 2}, ("dp_shard",), 2, ("cp",)),
        ({"dp_shard": 2, "cp": 2}, ("dp_shard", "cp"), 2, ()),
        ({"dp_replicate": 2, "dp_shard": 4}, ("dp_shard",), 2, ("dp_replicate",)),
        ({"dp_replicate": 2, "dp_shard": 2}, ("dp_replicate", "dp_shard"), 2, ()),
        ({"dp_shard": 2, "tp": 2}, ("dp_shard", "tp"), 2, ()),
    ],
    ids=str,
)
def test_fold_gradients_reduce_over_remaining_data_axes(axes, out_of, shards, copies):
    """Check a rank with half of the stack: ranks with the same half share its state; other data axes hold copies."""
    case = case_of(out_of, zero=1, **axes)
    (group,) = [group for group in memory.count_group_numbers(case, 0) if group.kind.fold]
    assert (group.shards, group.copies) == (shards, case.mesh.size(*copies))
    alone = case_of(out_of, size=1, zero=1, **axes)
    found = sent(case)
    own = STACK // 2
    assert found.get((f"{BESIDE}lane", "gradients")) == ((1, own * 4 // 2) if shards > 1 else None)
    assert found.get((f"{BESIDE}lane", "weights")) == ((1, own * 2 // 2) if shards > 1 else None)
    for axis in copies:
        crossing = 2 * own * 4 // shards * (case.mesh.size(*copies) - 1) // case.mesh.size(*copies)
        dense = sum(size for group, size in memory.count_group_numbers(case, 0).items() if not group.kind.fold)
        over_axis = 2 * dense * 4 // case.shards // 2 if axis == "dp_replicate" else 0
        assert found[axis, "gradients"][1] == pytest.approx(crossing + over_axis, abs=16)
    assert memory.count_state_bytes(alone, 0)["gradients"] - memory.count_state_bytes(case, 0)["gradients"] == own * 4


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dp_shard", [2, 4])
def test_state_bytes_on_fold_follow_zero_stage(zero, dp_shard):
    """Check 2 + 4 + 4 + 8 bytes per parameter (ZeRO, arXiv 1910.02054, section 3).

    The fold shards them, and then the ranks that hold the same shard of the fold.
    """
    case, without = (case_of(dp_shard=dp_shard, zero=zero, lanes=lanes) for lanes in (LANES, 0))
    own, beside = STACK // 2, dp_shard // 2
    parts = beside if zero else 1
    (stack,) = [array for array in case.list_held(0) if array.group.kind.fold]
    assert (stack.size, stack.part) == (own, own // beside)
    more = memory.count_state_bytes(case, 0)
    more.subtract(memory.count_state_bytes(without, 0))
    assert more["optimizer state"] == 8 * own // parts
    assert more["master weights"] == 4 * own // parts
    if zero < 2 or beside == 1:  # only the fold shards the gradients
        assert more["gradients"] == 4 * own
    if zero < 3 or beside == 1:
        assert more["weights"] == 2 * own


@pytest.mark.parametrize("tp", [1, 2])
def test_node_activation_bytes_include_children(tp):
    case = case_of(tp=tp, dp_shard=2, sequence_parallel=True)
    sizes, stream = activations.make_activation_sizes(case), 16 // tp
    norm = count_norm_bytes(sizes, stream, 32)
    assert count_node(case.by_path["blocks.1.feed_forward"], sizes) == stream * 100 + 16 * 2 + 4 + norm


def test_activation_bytes_of_undeclared_node_come_from_shapes():
    case = case_of(dp_shard=2)
    silent = SilentNode(dim=32, norm=NormNode(dim=32))
    guessed = 16 * (WIDTH + 32) * 2 + count_norm_bytes(activations.make_activation_sizes(case), 16, 32)
    assert count_node(silent, activations.make_activation_sizes(case)) == guessed


@pytest.mark.parametrize(("sequence_parallel", "times"), [(True, 1), (False, 2)])
def test_tp_ranks_repeat_fold_flops_without_sequence_parallelism(sequence_parallel, times):
    """Check that each tp rank processes all tokens in a module that tp does not shard, unless tp shards sequences."""
    one, two = (case_of(tp=2, lanes=lanes, sequence_parallel=sequence_parallel) for lanes in (LANES, 0))
    stack = 2 * STACK * 3 * 16 * one.microbatches
    assert timing.count_rank_flops(one, 0) - timing.count_rank_flops(two, 0) == times * stack // 2


def test_replaced_feed_forward_is_not_a_tp_region():
    """Check a plan that keeps the shard rule, because the other block still has a feed-forward."""
    case = case_of(tp=2, dp_shard=2)
    assert [len(tensor_traffic.get_regions(case, index)) for index in (0, 1)] == [2, 1]


@pytest.mark.parametrize(
    ("size", "per_node", "fold", "beside", "nearby"),
    [
        (4, 4, "node", "rack", "node"),
        (4, 2, "rack", "rack", "node"),
        (2, 4, "node", "rack", "node"),
        (8, 8, "node", "cluster", "node"),
    ],
)
def test_fold_and_replica_traffic_uses_expected_network_tier(size, per_node, fold, beside, nearby):
    """Check folds of neighbouring ranks; ranks that hold the same shard of a fold are far apart."""
    case = case_of(
        size=size,
        lanes=2 * LANES,
        dp_shard=16,
        topology=Topology(gpus_per_node=per_node, nodes_per_rack=16 // per_node if per_node < 8 else 1),
    )
    found = {(sent.axes[0], sent.purpose): find_slowest_tier(case, sent) for sent in traffic.list_sent(case, 0)}
    assert found["lane", "forth and back"] == fold
    assert found["lane", "nearby"] == nearby
    assert found[f"{BESIDE}lane", "gradients"] == beside
