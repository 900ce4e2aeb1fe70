"""`mtp=on` with dense blocks or experts: layout invariance, and its bytes, transfers and FLOPs in `explain`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from gangline import UserError
from gangline.config.check import check
from gangline.config.compose import compose_one
from gangline.mesh import Mesh
from gangline.model.build import construct
from gangline.model.compose import compose_model
from gangline.model.flops import count_parameters
from gangline_basics.explain.activations import count_angles
from gangline_parallel_megatron_style.cost import activations, timing, traffic
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.explain.of_run import explain_run, make_case
from gangline_parallel_megatron_style.explain.trace import trace
from gangline_parallel_megatron_style.sharding.ranks import find_active_fold
from gangline_testkit import StrategySuite, count_saved_bytes
from gangline_testkit.inputs import make_full_batch
from gangline_testkit.scenarios import FLOAT64, RunLayout, Scenario

SMALL = ("mtp=on", "mtp.depth=2", "batch.sequence_length=16", "run.deterministic=false")
FEW = ("batch.global_size=4", "batch.micro_size=1", "model.layers=2")
MANY = ("batch.global_size=8", "batch.micro_size=1", "model.layers=4")  # enough of both for pipeline schedules


class Layouts(StrategySuite):
    """Methods of the strategy suite, with an MTP model instead of the toy."""

    choice = "parallel=3d"


def holds(on: str, *settings: str, kind: str = "documents", steps: int = 2, bound: float = FLOAT64) -> None:
    """Compare losses, gradients, weights and metrics with one process. on: for example "pp=2 tp=2 zero=3"."""
    suite, layout = Layouts(), RunLayout.from_words(on)
    scenario = Scenario((*SMALL, *settings), kind, steps=steps)
    job = suite.make_job(layout, scenario)
    problems = [*job.run.parallel.check(job.run), *(p for edit in job.run.edits.values() for p in edit.check(job.run))]
    assert not problems, "\n".join(map(str, problems))
    suite.compare(layout, scenario, bound)
    got = suite.train_job(job)
    for of_rank in got:
        for one, want in zip(of_rank.steps, suite.train_reference(job, got[0].coordinate[1])[1], strict=True):
            assert one.metrics.keys() == want.metrics.keys()
            assert one.metrics["mtp_loss"] > 0
            for name, value in want.metrics.items():
                assert one.metrics[name] == pytest.approx(value, rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize(
    "on",
    [
        "dp_shard=2 zero=1",
        "dp_shard=2 zero=2",
        "dp_shard=2 dp_replicate=2 zero=3",
        "tp=2",
        "tp=2 sequence_parallel=false",
        "cp=2",
        "cp=2 context=ulysses",
        "pp=2",
        "pp=2 tp=2 zero=3",
        "cp=2 tp=2",
        "pp=2 schedule=zb_h1",
    ],
)
@pytest.mark.parametrize("tied", ["true", pytest.param("false", marks=pytest.mark.nightly)])
def test_mtp_matches_one_process_on_every_axis(on, tied):
    holds(on, f"model.tied={tied}", *(MANY if "pp" in on else FEW))


@pytest.mark.nightly
@pytest.mark.parametrize("on", ["dp_shard=2 zero=3", "tp=2", "cp=2", "pp=2 tp=2"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_mtp_matches_one_process(on, recompute):
    holds(on, f"run.recompute={recompute}", "model.layers=4", *(MANY if "pp" in on else ()))


def test_mtp_with_experts_matches_one_process():
    """Test the structure of DeepSeek-V3: the blocks of MTP modules have experts, whose routers get their own load."""
    experts = ("moe=on", "moe.ep=2", "moe.experts=4", "moe.shared=1", "moe/router=sigmoid", "moe.router.bias_rate=0.01")
    losses = ("moe.router.seq_aux_loss=0.01", "moe.router.global_aux_loss=0.01", "moe.router.z_loss=0.001")
    holds("dp_shard=2 tp=2 zero=2", *FEW, *experts, *losses, "moe.ep_axes=[dp_shard]")


def test_frozen_untrained_mtp_modules_are_refused():
    """Check adapters on untrained MTP modules; the weights of MTP modules must come from a model directory."""
    with pytest.raises(
        UserError, match="mtp=on with lora would freeze the weights of the MTP modules at random values"
    ) as refused:
        check(compose_one(["recipe=tiny", "mtp=on", "lora=on", "lora.targets=[wq]"]))
    assert "mtp=off, or lora=off" in str(refused.value)


# --- bytes, transfers and FLOPs in `explain` ---

TINY = (
    "model.layers=2 model.dim=32 model.heads=4 model.ffn_dim=48 model.vocab_size=37 mtp=on mtp.depth=2 run.device=cuda "
    "batch.global_size=8 batch.micro_size=2 batch.sequence_length=16"
)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("words", ["model.tied=true", "model.tied=false run.loss_chunk=8"])
def test_kept_bytes_of_head_match_closed_form(words, depth):
    case = make_case(
        compose_one([*TINY.split(), "parallel=tp", "launch.processes=1", f"mtp.depth={depth}", *words.split()])
    )
    model = construct(case.tree).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    batch = make_full_batch(torch.arange(32).view(2, 16) % 37)
    hidden = model.embed(batch).detach().requires_grad_()
    known = [*model.parameters(), batch.position, batch.targets]
    found, sizes = (
        count_saved_bytes(known, lambda: model.head(hidden, batch)),
        activations.make_activation_sizes(case, gpu=False),
    )
    told = activations.count_head_bytes(case, sizes)
    rows = 8 if "chunk" in words else 32
    in_backward = rows * 37 * 4 * (2 if "chunk" in words else 1) + 2 * rows * 37 * 4  # logits and their gradient
    angles = count_angles([case.blocks[1]], sizes)
    assert found == told["activations"] + told["logits"] - in_backward + angles


def test_explain_counts_mtp_for_ddp():
    run, mesh = compose_one([*TINY.split(), "parallel=ddp", "launch.processes=2"]), Mesh.of({"dp_replicate": 2})
    plain = replace(run, edits={})
    found, before = (one.parallel.explain(one, mesh).ranks[0] for one in (run, plain))
    more = count_parameters(compose_model(run)[0]) - count_parameters(compose_model(plain)[0])
    assert found.parameters - before.parameters == more > 0
    assert found.bytes["gradients"] - before.bytes["gradients"] == 4 * more
    assert found.bytes["logits"] - before.bytes["logits"] == 2 * 32 * (37 * 4 + 4 + 9)


WIDE = (
    "model.layers=2 model.dim=128 model.heads=4 model.ffn_dim=256 model.vocab_size=512 mtp=on mtp.depth=2 "
    "run.device=cuda batch.global_size=4 batch.micro_size=1 batch.sequence_length=16"
)
FOUR = "launch.processes=4 parallel.dp_shard=1"
LAYOUTS = [
    "parallel=tp launch.processes=2 parallel.sequence_parallel=false run.recompute=full run.recompute_every=2",
    "parallel=fsdp launch.processes=4 parallel.zero=2 precision=bf16",
    f"parallel=3d {FOUR} parallel.tp=1 parallel.cp=2 parallel.context=ulysses run.recompute=selective",
    f"parallel=3d {FOUR} run.recompute=full run.recompute_every=2",
]
MORE = [
    "parallel=tp launch.processes=2 model.tied=false",
    "parallel=fsdp launch.processes=4 model.tied=false run.recompute=selective",
    f"parallel=3d {FOUR} parallel.tp=1 parallel.cp=2 model.tied=false run.recompute=full",
    "parallel=3d launch.processes=8 parallel.zero=3 model.tied=false run.recompute=full",
    "parallel=fsdp launch.processes=4 parallel.zero=2 moe=on moe/router=softmax moe.router.bias_rate=0.01 moe.ep=2 "
    "run.recompute=full",
]
EVERY = [*LAYOUTS, *(pytest.param(words, marks=pytest.mark.nightly) for words in MORE)]


@pytest.mark.parametrize("words", EVERY)
def test_transfers_of_step_match_trace(words):
    """Compare with a trace: exact, except for the padding of buffers of weights and gradients."""
    case = make_case(run := compose_one([*WIDE.split(), *words.split()]))
    rank = case.pp - 1  # the last stage has the head
    real, told, calls = trace(run, case, rank), Counter[str](), Counter[str]()
    for sent in traffic.list_sent(case, rank):
        axis = "data" if sent.purpose in ("gradients", "weights") else sent.axes[0]
        told[axis] += sent.bytes
        calls[axis] += sent.calls
    found, made = Counter[str](), Counter[str]()
    for (axis, operation), nbytes in real.sent.items():
        to, ranks = ranks_of(case, axis)
        rings = {"all_gather": ranks - 1, "all_reduce": Fraction(2 * (ranks - 1), ranks), "exchange": 1}
        found[to] += int(nbytes * rings.get(operation, Fraction(ranks - 1, ranks)))
        made[to] += real.calls[axis, operation]
    assert told["data"] <= found.pop("data", 0) <= 1.02 * told.pop("data", 0)
    assert told == found
    for axis in ("tp", "data", "ep"):
        assert calls[axis] == made[axis]


def ranks_of(case: Case, axis: str) -> tuple[str, int]:
    """Return the key under which the traffic along an axis is counted, and the number of its ranks."""
    if axis in ("ep", "ep_rest"):
        fold = find_active_fold(case.plan, case.mesh, "ep")
        assert fold is not None
        whole = case.mesh.size(*fold.out_of)
        return ("ep", fold.size) if axis == "ep" else ("data", whole // fold.size)
    if axis == "world":
        return "data", case.mesh.world
    return (axis if axis in ("tp", "cp", "pp") else "data"), case.mesh.size(*axis.split("+"))


@pytest.mark.parametrize("words", EVERY)
def test_flops_of_all_ranks_match_one_process(words):
    """Check that all ranks have the FLOPs of one process in total, and that each stage matches the closed form."""
    run = compose_one([*WIDE.split(), *words.split()])
    alone = compose_one(
        [*WIDE.split(), *(word for word in words.split() if word.startswith(("model.", "run.", "moe")))]
    )
    case, found = make_case(run), explain_run(run)
    one = alone.parallel.explain(alone, Mesh.of({})).ranks[0].flops
    every = sum(rank.flops for rank in found.ranks) * case.mesh.world // case.pp
    if "sequence_parallel=false" in words:
        assert every > one  # each rank repeats the matmuls that merge embeddings
    elif "selective" not in words:  # its recomputed attention counts only in the products
        assert every == one
    assert found.unknown == ()
    for stage, work in enumerate(found.work):
        total = work.flops - work.unknown_flops
        assert total * case.tp / case.tokens == pytest.approx(timing.count_stage_flops(case)[stage].forward, rel=0.001)


@pytest.mark.parametrize(
    "words",
    [
        "parallel=fsdp",
        pytest.param("parallel=fsdp parallel.zero=1", marks=pytest.mark.nightly),
        pytest.param("parallel=fsdp parallel.zero=2 model.tied=true mtp.depth=2", marks=pytest.mark.nightly),
        pytest.param("parallel=3d parallel.pp=2 parallel.tp=4", marks=pytest.mark.nightly),
        pytest.param("parallel=fsdp run.recompute=full", marks=pytest.mark.nightly),
    ],
)
def test_peak_memory_matches_closed_form(words):
    """Compare the last stage with a trace within 3 %."""
    shape = "model=llama3-8b model.layers=2 precision=bf16 mtp=on run.device=cuda launch.processes=8"
    batch = "batch.micro_size=1 batch.sequence_length=4096 batch.global_size=16"
    case = make_case(run := compose_one([*shape.split(), *batch.split(), *words.split()]))
    found = explain_run(run).ranks[case.pp - 1].memory
    assert trace(run, case, case.pp - 1).peak == pytest.approx(found, rel=0.03)
