"""Closed forms of activation bytes, compared with the tensors that autograd saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_cost_traffic import microbatch
from torch import nn

from gangline.config import RunSection
from gangline.config.defaults import build_default_run
from gangline.config.sections import Recompute
from gangline.mesh import Mesh
from gangline.model.build import construct
from gangline.model.compose import Composed
from gangline.plugin import registry
from gangline.runtime import Job
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.explain.activations import ActivationSizes
from gangline_basics.model.config import DecoderConfig
from gangline_parallel_megatron_style.config import Pp, Tp
from gangline_parallel_megatron_style.cost import activations, peak_memory, timing
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.explain.fake_comms import FakeComms
from gangline_testkit import count_saved_bytes

MODEL = DecoderConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def case_of(
    model: DecoderConfig = MODEL, precision: str = "fp32", config=None, recompute: str = "none", **axes: int
) -> Case:
    run = build_default_run(
        parallel=config or Tp(),
        model=model,
        precision=precision,
        run=RunSection(recompute=Recompute(recompute)),
        batch={"global_size": 8, "micro_size": 2, "sequence_length": 16},
    )
    return Case.of(run, Mesh.of(axes))


def built(case: Case, precision: str) -> nn.Module:
    model = construct(case.tree).to(DTYPES[precision]).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    finish = make_finish(case.recompute, False, 1, case.plan.seams)
    for index, block in enumerate(model.blocks):
        finish(block, f"blocks.{index}")
    return model


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("model", [MODEL, replace(MODEL, qk_norm=True)], ids=["plain", "qk_norm"])
def test_block_activation_bytes_match_closed_form(model, precision):
    case = case_of(model, precision)
    module, batch = built(case, precision), microbatch(case)
    hidden = module.embed(batch)
    sizes = activations.make_activation_sizes(case, gpu=False)
    found = count_saved_bytes(module.parameters(), lambda: module.blocks[1](hidden, batch))
    assert found == activations.count_block(case, 1, sizes) + activations.count_angle_bytes(case, sizes)


@pytest.mark.parametrize("precision", DTYPES)
def test_a_recomputed_block_keeps_its_input(precision):
    case = case_of(precision=precision, recompute="full")
    module, batch = built(case, precision), microbatch(case)
    hidden = module.embed(batch).detach().requires_grad_()
    tokens = [batch.tokens, batch.position, batch.targets, batch.loss_mask, batch.sample]
    found = count_saved_bytes([*module.parameters(), *tokens], lambda: module.blocks[1](hidden, batch))
    assert found == activations.count_block(case, 1, activations.make_activation_sizes(case, gpu=False))


@pytest.mark.parametrize("precision", DTYPES)
def test_selective_recompute_bytes_match_closed_form(precision):
    """Check that selective recomputation frees one number per row and head: fused attention stores no scores.

    On a CPU it also frees the output, which the next matmul copies.
    """
    whole, case = case_of(precision=precision), case_of(precision=precision, recompute="selective")
    saved = [activations.count_block(whole, 0, sizes) - activations.count_block(case, 0, sizes) for sizes in both(case)]
    assert saved == [2 * 16 * 4 * 4, 2 * 16 * 4 * (4 + 8 * case.bytes.compute)]
    module, batch = built(case, precision), microbatch(case)
    hidden = module.embed(batch)
    tokens = [batch.tokens, batch.position]
    found = count_saved_bytes([*module.parameters(), *tokens], lambda: module.blocks[1](hidden, batch))
    sizes = activations.make_activation_sizes(case, gpu=False)
    assert found == activations.count_block(case, 1, sizes) + activations.count_angle_bytes(case, sizes)


def both(case: Case) -> tuple[ActivationSizes, ActivationSizes]:
    return activations.make_activation_sizes(case), activations.make_activation_sizes(case, gpu=False)


@pytest.mark.parametrize("precision", DTYPES)
def test_head_activation_bytes_match_closed_form(precision):
    case = case_of(precision=precision)
    module, batch = built(case, precision), microbatch(case)
    hidden = module.embed(batch)
    sizes = activations.make_activation_sizes(case, gpu=False)
    found = count_saved_bytes(module.parameters(), lambda: module.head(hidden, batch))
    closed = activations.count_head_bytes(case, sizes)
    logits = 2 * 16 * 64 * case.bytes.compute
    backward = logits + 2 * 2 * 16 * 64 * 4  # gradient of the logits; a piece of logits in float32, its exponentials
    assert found == closed["activations"] + closed["logits"] - backward


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_tp_block_activation_bytes_match_closed_form(tp, sequence_parallel):
    """Compare equations 2 and 4 of arXiv 2205.05198 with the modules of the runtime."""
    run = build_default_run(
        parallel=Tp(sequence_parallel=sequence_parallel),
        model=replace(MODEL, kv_heads=4),
        batch={"global_size": 2, "sequence_length": 16},
    )
    mesh = Mesh.of({"tp": tp})
    case, comms = Case.of(run, mesh), FakeComms(mesh)
    finish, precision = make_finish(Recompute.none, False), registry.build(run.precision, run)
    job = Job(Composed(run, case.tree, case.plan), mesh, comms, precision, finish)
    runtime, made = registry.build(run.parallel, job), job.model
    for shard in runtime.shards():
        nn.init.normal_(shard.local, std=0.02)
    batch = microbatch(case)
    hidden = torch.randn(16 // (tp if sequence_parallel else 1), 2, 32).transpose(0, 1).requires_grad_()
    if not sequence_parallel:
        hidden = hidden.detach().contiguous().requires_grad_()
    sizes = activations.make_activation_sizes(case, gpu=False)
    found = count_saved_bytes(made.parameters(), lambda: made.get_submodule("blocks.1")(hidden, batch))
    assert found == activations.count_block(case, 1, sizes) + activations.count_angle_bytes(case, sizes)


def test_pipeline_activations_in_flight_follow_the_schedule():
    """Check p - r microbatches on rank r for 1F1B (arXiv 2104.04473, section 2.2.1), and all microbatches for GPipe."""
    model = replace(MODEL, layers=4)
    for schedule, counts in (("1f1b", (4, 3, 2, 1)), ("gpipe", (4, 4, 4, 4))):
        case = case_of(model, config=Pp(schedule=schedule, stages=[1, 1, 1, 1]), pp=4)
        sizes, order = activations.make_activation_sizes(case), timing.find_schedule(case)
        each = activations.count_block(case, 0, sizes) + activations.count_angle_bytes(case, sizes)
        head = activations.count_head_bytes(case, sizes)["activations"]
        for rank, count in enumerate(counts):
            assert peak_memory.count_under_way(case, rank, order, sizes) == count * (each + (head if rank == 3 else 0))
