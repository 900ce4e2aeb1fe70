"""`gangline parallel explain` of models with experts: bytes, transfers and FLOPs against the model."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from gangline.config.compose import compose_one
from gangline.config.defaults import build_default_run
from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline.model import forward_context
from gangline.model.build import construct
from gangline.model.compose import Composed
from gangline.model.linear_nodes import LinearNode
from gangline.model.local_sizes import LocalSizes
from gangline.plan import Fold, Plan
from gangline.plugin import registry
from gangline.runtime import Job
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.model.decoder_nodes import FeedForwardNode
from gangline_basics.model.gating import Gating
from gangline_basics.parallel.prepare import set_matmuls
from gangline_moe.config import FOLD, MoeOptions
from gangline_moe.dispatch.dispatcher import TokenDispatcher
from gangline_moe.edit import make_layer_node
from gangline_moe.nodes import MoeNode
from gangline_moe.routers.config import Biased, Grouped, Sigmoid, Softmax
from gangline_parallel_megatron_style.commands import main
from gangline_parallel_megatron_style.cost import activations, memory, timing, traffic
from gangline_parallel_megatron_style.cost.activations import ActivationSizes
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.links import find_slowest_tier
from gangline_parallel_megatron_style.explain.fake_comms import FakeComms
from gangline_parallel_megatron_style.explain.of_run import explain_run, make_case
from gangline_parallel_megatron_style.explain.trace import Allocations, Traced, trace
from gangline_parallel_megatron_style.sharding.ranks import find_active_fold

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DIM, HIDDEN, EXPERTS, B, T = 32, 48, 8, 2, 16
BOUNDED = FeedForwardNode(
    dim=DIM,
    ffn_dim=HIDDEN,
    gating=Gating(slope=1.7, limit=7.0, offset=1.0),
    **dict.fromkeys(("w_gate", "w_up", "w_down"), LinearNode(bias=True)),
)


# --- activation bytes of a layer ---


def kept(node: MoeNode, precision: str, ep: int) -> int:
    """Return the bytes that a layer's forward pass keeps on a rank, without its output."""
    layer = construct(node)
    plan = Plan("embed", "blocks", "head", 1, master_dtype=("router",))
    layer.experts.to(DTYPES[precision])
    if layer.shared is not None:
        layer.shared.to(DTYPES[precision])
    set_matmuls(layer, plan, registry.build(build_default_run(precision=precision).precision, build_default_run()))
    layer.bind(FakeComms(Mesh.of({"dp_shard": ep}), 0, "meta").fold(Fold(FOLD, ep, ("dp_shard",))))
    with forward_context.frame(forward_context.Frame()), torch.device("meta"), Allocations(left_out=layer) as counted:
        given = torch.empty(B, T, DIM, dtype=DTYPES[precision], requires_grad=True)
        y = layer(given * 1)
        gc.collect()
        return counted.live - given.nbytes - y.untyped_storage().nbytes()


OPTIONS = [
    {},
    {"shared": 1},
    {"router": Softmax(renormalise=False)},
    {"router": Softmax(z_loss=0.1)},
    {"router": Softmax(jitter=0.1), "shared": 1},
    {"router": Sigmoid(bias_rate=0.0), "top_k": 3},
    {"router": Grouped(bias_rate=0.0, groups=4, top_groups=2, jitter=0.1)},
    {"router": Biased(), "dense": BOUNDED},
]
DAYS = {("fp32", 1), ("bf16", 8)}  # cases of each option by default; a layer without options runs on all


@pytest.mark.parametrize(
    ("precision", "ep", "options"),
    [
        pytest.param(
            precision, ep, options, marks=pytest.mark.nightly if options and (precision, ep) not in DAYS else ()
        )
        for precision in DTYPES
        for ep in (1, 2, 8)
        for options in OPTIONS
    ],
    ids=str,
)
def test_kept_bytes_of_layer_match_node(precision, ep, options):
    given = {"experts": EXPERTS, "ffn_dim": HIDDEN, **options}
    node = make_layer_node(given.pop("dense", FeedForwardNode(dim=DIM, ffn_dim=HIDDEN)), MoeOptions(**given))
    nbytes = DTYPES[precision].itemsize
    sizes = ActivationSizes(
        local=LocalSizes(tokens=B * T, inner_tokens=B * T, itemsize=nbytes, master_itemsize=4, ranks={FOLD: ep})
    )
    found, told = kept(node, precision, ep), activations.count_node(node, sizes)
    assert told <= found <= told + 4 * B * 4 * EXPERTS  # loss terms keep a few numbers per sequence and expert


# --- transfers and state of a rank ---

SMALL = (
    "model.layers=2 model.dim=128 model.heads=4 model.ffn_dim=256 model.vocab_size=512 model.tied=false "
    "run.device=cuda "
    "batch.global_size=16 batch.micro_size=1 batch.sequence_length=16 "
    "moe=on moe/router=softmax moe.router.bias_rate=0.01"
)  # no sequence-level loss: the closed form omits its sums over cp, a few numbers per expert
LAYOUTS = [
    "parallel=fsdp launch.processes=4 moe.ep=2",
    "parallel=fsdp launch.processes=4 moe.ep=4 precision=bf16",
    "parallel=fsdp launch.processes=4 moe.ep=2 precision=bf16 run.recompute=full",
    "parallel=fsdp launch.processes=8 parallel.cp=2 moe.ep=4 parallel.zero=2 moe.shared=1",
    "parallel=fsdp launch.processes=8 parallel.cp=2 moe.ep=2 moe.ep_axes=[cp] run.recompute=selective",
    "parallel=hsdp launch.processes=8 parallel.dp_shard=4 moe.ep=2 precision=bf16",
    "parallel=hsdp launch.processes=8 parallel.dp_shard=4 moe.ep=4 parallel.zero=0",
    "parallel=hsdp launch.processes=8 parallel.dp_shard=2 moe.ep=4 moe.ep_axes=[dp_replicate,dp_shard]",
    "parallel=3d launch.processes=16 parallel.dp_shard=4 moe.ep=2 moe.every=2 moe.first=1 moe.shared=1",
    "parallel=3d launch.processes=16 parallel.dp_shard=4 moe.ep=8 moe.ep_axes=[dp_shard,tp] precision=bf16",
    "parallel=3d launch.processes=8 parallel.pp=1 parallel.dp_shard=4 moe.ep=2 parallel.sequence_parallel=false",
    "parallel=fsdp launch.processes=4 moe.ep=1 precision=bf16",
]


def moved(real: Traced, case: Case) -> Counter[str]:
    """Return axis -> bytes that a rank sends in a ring. "data" sums all axes but the fold, tp, cp and pp."""
    mesh, fold = case.mesh, find_active_fold(case.plan, case.mesh, FOLD)
    ranks = {"world": mesh.world}
    if fold is not None:
        ranks |= {FOLD: fold.size, f"{FOLD}_rest": mesh.size(*fold.out_of) // fold.size}
    found: Counter[str] = Counter()
    for (axis, operation), nbytes in real.sent.items():
        n = ranks.get(axis) or mesh.size(*axis.split("+"))
        rings = {"all_gather": n - 1, "all_reduce": Fraction(2 * (n - 1), n), "exchange": 1}
        found[axis if axis in (FOLD, "tp", "cp", "pp") else "data"] += int(
            nbytes * rings.get(operation, Fraction(n - 1, n))
        )
    return found


@pytest.mark.parametrize("words", LAYOUTS)
def test_transfers_of_step_match_trace(words):
    """Compare with a trace: exact over the fold, pp and cp, within 2 % over tp and 5 % (padding) over data axes."""
    case = make_case(run := compose_one([*SMALL.split(), *words.split()]))
    for rank in range(case.pp):
        real, told, calls = trace(run, case, rank), Counter[str](), 0
        for sent in traffic.list_sent(case, rank):
            told["data" if sent.purpose in ("gradients", "weights") else sent.axes[0]] += sent.bytes
            calls += sent.calls if sent.axes == (FOLD,) else 0
        found = moved(real, case)
        assert told[FOLD] == found[FOLD]
        assert calls == sum(count for (axis, _), count in real.calls.items() if axis == FOLD)
        assert told["data"] <= found["data"] <= 1.05 * told["data"]
        assert found["tp"] == pytest.approx(told["tp"], rel=0.02)
        assert (told["pp"], told["cp"]) == (found["pp"], found["cp"])


@pytest.mark.parametrize("words", LAYOUTS)
def test_state_bytes_of_rank_match_storage(words):
    """Compare with the storage that strategy and optimizer allocate, up to the padding of buffers."""
    run = compose_one([*SMALL.split(), *words.split()])
    case = Case.of(run, mesh := Mesh.of(run.parallel.size_axes(run.launch.processes)))
    for pp in range(case.pp):
        comms = FakeComms(mesh, mesh.rank({"pp": pp}), "meta")
        precision, finish = registry.build(run.precision, run), make_finish(run.job.recompute, False)
        job = Job(Composed(run, case.tree, case.plan), mesh, comms, precision, finish)
        runtime = registry.build(run.parallel, job)
        optimizer = registry.build(run.optimizer, run, runtime)
        buffers, told = runtime.storage.param_buffers, memory.count_state_bytes(case, pp)
        numbers = sum(array.size for array in case.list_held(pp))
        assert sum(x.numel() for buffer in buffers for x in buffer.parameters.values()) == numbers
        states = sum(shard.local.nbytes for shard in optimizer.shards())
        assert told["optimizer state"] == pytest.approx(states, rel=0.03)
        apart = [
            buffer.shard
            for buffer in buffers
            if buffer.shard.untyped_storage()._cdata != buffer.full.untyped_storage()._cdata
        ]
        assert told["master weights"] == pytest.approx(sum(shard.nbytes for shard in apart), rel=0.03)
        lasting = sum(buffer.full.nbytes for buffer in buffers if not buffer.reshards)
        assert told["weights"] == pytest.approx(lasting, rel=0.03)


SHAPE = (
    "model=llama3-8b model.layers=4 precision=bf16 batch.micro_size=1 batch.sequence_length=4096 batch.global_size=16"
)
PIPELINE = "parallel=3d parallel.tp=8 parallel.pp=2 parallel.dp_shard=4 launch.processes=64"


@pytest.mark.parametrize(
    "words",
    [
        f"{PIPELINE} moe.ep=2",
        f"{PIPELINE} moe.ep=1 parallel.zero=2",
        "parallel=fsdp launch.processes=8 moe.ep=1",
        "parallel=fsdp launch.processes=8 moe.ep=2",
        "parallel=fsdp launch.processes=8 moe.ep=8 parallel.zero=1 moe.shared=1 moe/router=sigmoid",
        "parallel=fsdp launch.processes=8 moe.ep=4 moe.capacity_factor=1.25",
        "parallel=fsdp launch.processes=8 moe.ep=4 moe/router=expert_choice",
    ],
)
def test_peak_memory_matches_closed_form(words):
    run = compose_one([*SHAPE.split(), "moe=on", *words.split()])
    found = explain_run(run)
    peak = trace(run, make_case(run), found.fullest).peak
    assert peak == pytest.approx(found.ranks[found.fullest].memory, rel=0.03)


def test_tokens_are_dispatched_inside_node_first():
    """Run the real dispatcher on a communicator that counts bytes, and compare with the volumes of the node."""
    words = "parallel=fsdp launch.processes=8 parallel.topology.gpus_per_node=4"
    run = compose_one([*SMALL.split(), *words.split(), "moe.ep=8", "moe.experts=64", "moe.ranks_per_node=4"])
    case = Case.of(run, mesh := Mesh.of(run.parallel.size_axes(8)))
    comms = FakeComms(mesh)
    comm, layer = comms.fold(find_active_fold(case.plan, mesh, FOLD)), construct(case.by_path["blocks.0.feed_forward"])
    rows = torch.zeros(B * 64, 128, requires_grad=True)
    dispatcher = TokenDispatcher(comm, rows, torch.full((64,), len(rows) // 64), layer.node.ranks_per_node)
    dispatcher.combine(dispatcher.dispatch() * 1).sum().backward()
    sizes = replace(case.sizes, tokens=len(rows) // 2)
    inside_nodes, between = layer.node.list_volumes(sizes)
    bytes_of = comms.traffic.bytes
    told = sum(volume.forward[1] + volume.backward[1] for volume in (inside_nodes, between))
    small = Fraction(7, 8) * bytes_of[FOLD, "all_to_all"] + 7 * bytes_of[FOLD, "all_gather"]
    assert told == bytes_of[FOLD, "exchange"] + small
    of = {sent.purpose: find_slowest_tier(case, sent) for sent in traffic.list_fold_traffic(case, 0)}
    assert of == {inside_nodes.what: "node", between.what: "rack"}


def test_explain_shows_link_of_each_transfer(capsys):
    assert (
        main(["explain", *SMALL.split(), "parallel=hsdp", "launch.processes=16", "parallel.dp_shard=8", "moe.ep=4"])
        == 0
    )
    rows = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    links_of = {tuple(row[:2]): row[2] for row in rows if len(row) == 6}
    assert links_of[FOLD, "rows to experts and back (even load)"] == "node"
    assert links_of[f"beside {FOLD}", "gradients"] == "node"
    assert links_of["dp_replicate", "gradients"] == "rack"


def test_too_many_router_groups_are_refused():
    words = "parallel=fsdp launch.processes=8 moe.experts=8 moe/router=grouped moe.router.groups=8"
    with pytest.raises(UserError, match="into groups of two or more"):
        explain_run(compose_one([*SMALL.split(), *words.split()]))


def test_explain_needs_no_torch():
    words = ["explain", *SMALL.split(), "parallel=fsdp", "launch.processes=8", "moe.ep=2"]
    script = (
        "import sys; from gangline_parallel_megatron_style.commands import main; "
        f"assert main({words!r}) == 0; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_explain_of_expert_layout_matches_closed_forms():
    run = compose_one(["parallel=3d", "moe=on", "moe.ep=2", "optimizer=muon"])
    mesh = Mesh.of(run.parallel.size_axes(8))
    case, found = Case.of(run, mesh), run.parallel.explain(run, mesh)
    assert found is not None
    assert found.unknown == ()
    for rank, explained_rank in enumerate(found.ranks):
        ours, closed = Counter[tuple](), Counter[tuple]()
        for sums, every in ((ours, explained_rank.transfers), (closed, traffic.list_sent(case, rank))):
            for sent in every:
                sums[sent.axes, sent.purpose, "calls"] += sent.calls
                sums[sent.axes, sent.purpose, "bytes"] += sent.bytes
        assert ours == closed
        assert any(axes == ("ep",) for axes, _, _ in ours)
        work = [found.work[stage] for stage in explained_rank.stages]
        total = sum(
            2 * w.flops + sum(p.flops * n for p, n in w.forward.items() if not hasattr(p, "weight") or p in w.weights)
            for w in work
        )
        assert total * found.microbatches == pytest.approx(timing.count_rank_flops(case, rank), rel=0.02)
