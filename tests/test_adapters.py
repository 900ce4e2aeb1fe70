"""`lora=on` across packages: adapters match one process on every axis, and `explain` counts their bytes."""

from __future__ import annotations

import re

import pytest
import torch

from gangline.config.compose import compose_one
from gangline.mesh import Mesh
from gangline.model.compose import Composed
from gangline.plugin import registry
from gangline.runtime import Job
from gangline.train.recompute_and_compile import make_finish
from gangline_parallel_megatron_style.commands import main
from gangline_parallel_megatron_style.cost import memory, traffic
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.explain.fake_comms import FakeComms
from gangline_testkit import StrategySuite
from gangline_testkit.inputs import make_full_batch
from gangline_testkit.runs import build_small_run
from gangline_testkit.scenarios import FLOAT64, RunLayout, Scenario

EVERY = "lora.targets=[wq,wk,wv,wo,w_gate,w_up,w_down]"
SMALL = ("lora=on", "lora.rank=3", EVERY, "batch.sequence_length=16", "run.deterministic=false")
FEW = ("batch.global_size=4",)
MANY = ("batch.global_size=8", "batch.micro_size=1", "model.layers=4")  # four microbatches on each of two data ranks


class Layouts(StrategySuite):
    """Methods of the strategy suite, applied to a model with adapters."""

    choice = "parallel=3d"


def holds(on: str, *settings: str, more: tuple[str, ...] = SMALL) -> None:
    layout, scenario = RunLayout.from_words(on), Scenario((*more, *settings), "ragged", torch.float64, steps=2)
    suite = Layouts()
    job = suite.make_job(layout, scenario)
    assert not (problems := job.run.parallel.check(job.run)), "\n".join(map(str, problems))
    suite.compare(layout, scenario, FLOAT64)
    names = suite.train_job(job)[0].names
    assert names
    assert all(".lora_" in name for name in names)


@pytest.mark.parametrize(
    "on",
    [
        "tp=2",
        pytest.param("tp=2 sequence_parallel=false", marks=pytest.mark.nightly),
        "tp=2 dp_shard=2 zero=3",
        pytest.param("tp=4 dp_shard=2 zero=3", marks=pytest.mark.nightly),
        "pp=2 dp_shard=2 zero=2 schedule=zb_h1",
        "cp=2 dp_shard=2 zero=1",
        "pp=2 tp=2 schedule=interleaved_1f1b sequence_parallel=false",
    ],
)
def test_adapters_match_one_process_on_every_axis(on):
    holds(on, *(MANY if "pp" in on else FEW), *(("model.tied=true",) if on == "tp=2" else ()))


@pytest.mark.parametrize(
    "on",
    [
        "tp=2",
        "tp=2 sequence_parallel=false",
        "pp=2 dp_shard=2 zero=3",
        pytest.param("tp=2 pp=2 dp_shard=2 zero=3", marks=pytest.mark.nightly),
    ],
)
def test_adapter_dropout_and_row_lengths_match_one_process(on):
    holds(on, "lora.dora=true", "lora.dropout=0.4", *(MANY if "pp" in on else FEW))


@pytest.mark.parametrize(
    ("on", "ep", "out_of"),
    [
        pytest.param("dp_shard=2 zero=3", 2, "dp_shard", marks=pytest.mark.nightly),
        ("dp_shard=2 tp=2", 4, "dp_shard,tp"),
        ("pp=2 dp_shard=2", 2, "dp_shard"),
    ],
)
def test_adapters_on_experts_match_one_process(on, ep, out_of):
    holds(
        on,
        "moe=on",
        "moe.experts=4",
        "moe.shared=1",
        f"moe.ep={ep}",
        f"moe.ep_axes=[{out_of}]",
        *(MANY if "pp" in on else FEW),
    )


@pytest.mark.parametrize("tp", ["tp=2", "tp=2 sequence_parallel=false"])
@pytest.mark.parametrize("targets", ["[wq,wv]", "[wq,wk,wv,wo,w_gate,w_up,w_down]"])
def test_explain_counts_bytes_of_adapters(tp, targets):
    """Compare exact bytes: tp transfers, gradients and optimizer state of the adapters alone, and all weights."""
    words = [f"parallel.{word}" for word in tp.split()]
    run = build_small_run("parallel=tp", *words, *SMALL, f"lora.targets={targets}", "precision=fp32")
    mesh = Mesh.of(run.parallel.size_axes(2))
    case, comms, precision = Case.of(run, mesh), FakeComms(mesh, 0), registry.build(run.precision, run)
    finish = make_finish(run.job.recompute, False)
    job = Job(Composed(run, case.tree, case.plan), mesh, comms, precision, finish)
    runtime = registry.build(run.parallel, job)
    comms.traffic.bytes.clear()
    batch = make_full_batch(torch.zeros(case.micro_size, case.sequence_length, dtype=torch.int64))
    runtime.step([batch] * case.microbatches)
    told = sum(sent.bytes for sent in traffic.list_sent(case, 0) if sent.axes == ("tp",))
    handed = comms.traffic.bytes
    assert told == handed["tp", "all_gather"] + handed["tp", "reduce_scatter"] // 2 + handed["tp", "all_reduce"]
    held, optimizer = memory.count_state_bytes(case, 0), registry.build(run.optimizer, run, runtime)
    gradients = [piece.tensor.grad for named in runtime.parameters() for piece in named.pieces]
    assert held["gradients"] == sum(gradient.nbytes for gradient in gradients)
    assert held["optimizer state"] == sum(shard.local.nbytes for shard in optimizer.shards())
    assert held["weights"] == sum(shard.local.nbytes for shard in runtime.shards())


@pytest.mark.parametrize("targets", ["[wq,wv]", "[wq,wk,wv,wo,w_gate,w_up,w_down]"])
def test_closed_form_peak_of_frozen_model_matches_trace(targets, capsys):
    """Compare with a trace within 3.5 %.

    A frozen base has no gradients and no optimizer state, and saves no inputs for gradients of its weights.
    """
    shape = ("model=llama3-8b", "model.layers=4", "precision=bf16", "batch.micro_size=1", "batch.sequence_length=4096")
    words = ("parallel=fsdp", "launch.processes=8", "batch.global_size=16", "lora=on", f"lora.targets={targets}")
    assert main(["explain", "--trace", *shape, *words]) == 0
    said = capsys.readouterr().out
    ratio = re.search(r"([\d.]+) x the total above", said)
    assert ratio is not None, said
    assert abs(float(ratio[1]) - 1) <= 0.035, said


@pytest.mark.parametrize(
    ("words", "other", "same"),
    [
        (("model=phi3",), "wq, wk, wv, w_gate, w_up", "wo,w_down"),
        (("model=gpt2",), "wq, wk, wv", "wo,w_up,w_down"),
    ],
)
def test_adapters_unsupported_by_peft_give_notice(words, other, same):
    run = compose_one([*words, "lora=on"])
    (note,) = run.edits["lora"].list_notices(run)
    assert f"peft does not support adapters of {other}, because" in note, note
    assert f"lora.targets=[{same}] excludes these linears" in note, note
    run = compose_one([*words, "lora=on", f"lora.targets=[{same}]"])
    assert run.edits["lora"].list_notices(run) == []
    run = compose_one(["recipe=tiny", "lora=on"])
    assert run.edits["lora"].list_notices(run) == []
