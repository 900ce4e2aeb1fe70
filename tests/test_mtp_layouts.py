"""Multi-token prediction obeys the law of layouts, its blocks dense or of experts; and what is explained of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gangline import UserError
from gangline.config.check import check
from gangline.config.compose import compose_one
from gangline.explain import of_angles
from gangline.mesh import Mesh
from gangline.model import compose_model, construct, parameter_count
from gangline.testing import StrategySuite, bytes_kept
from gangline.testing.inputs import whole_sequences
from gangline.testing.scenarios import FLOAT64, Layout, Scenario
from gangline_parallel_megatron_style.cost import activations
from gangline_parallel_megatron_style.explain.explained import case_of, explained

SMALL = ("mtp=on", "mtp.depth=2", "batch.sequence_length=16", "run.deterministic=false")
FEW = ("batch.global_size=4", "batch.micro_size=1", "model.layers=2")
MANY = ("batch.global_size=8", "batch.micro_size=1", "model.layers=4")  # for a pipeline to have something to order


class Law(StrategySuite):
    """The suite's machinery, with such a model in the place of the toy."""

    choice = "parallel=3d"


def holds(on: str, *settings: str, kind: str = "documents", steps: int = 2, bound: float = FLOAT64) -> None:
    """Loss, gradients, norm, weights, metrics and evaluation against one process. on: "pp=2 tp=2 zero=3"."""
    law, layout = Law(), Layout.on(on)
    scenario = Scenario((*SMALL, *settings), kind, steps=steps)
    job = law.job(layout, scenario)
    problems = [*job.run.parallel.check(job.run), *(p for edit in job.run.edits.values() for p in edit.check(job.run))]
    assert not problems, "\n".join(map(str, problems))
    law.compare(layout, scenario, bound)
    got = law.trained(job)
    for of_rank in got:
        for one, want in zip(of_rank.steps, law.expected(job, got[0].coordinate[1])[1], strict=True):
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
def test_every_axis_has_what_one_process_has(on, tied):
    holds(on, f"model.tied={tied}", *(MANY if "pp" in on else FEW))


def test_blocks_of_experts_and_their_routers_in_the_head():
    """DeepSeek-V3's shape: the modules' blocks have experts, whose routers are told their own load."""
    experts = ("moe=on", "moe.ep=2", "moe.experts=4", "moe.shared=1", "moe/router=sigmoid", "moe.router.bias_rate=0.01")
    losses = ("moe.router.sequence_loss=0.01", "moe.router.step_loss=0.01", "moe.router.z_loss=0.001")
    holds("dp_shard=2 tp=2 zero=2", *FEW, *experts, *losses, "moe.ep_out_of=[dp_shard]")


def test_what_is_drawn_and_frozen_is_refused():
    """Adapters beside modules that nobody has trained: a directory has to bring the modules."""
    with pytest.raises(UserError, match="beside lora they stay as they are drawn") as refused:
        check(compose_one(["recipe=tiny", "mtp=on", "lora=on", "lora.targets=[wq]"]))
    assert "mtp=off, or lora=off" in str(refused.value)


# --- what is explained of it ------------------------------------------------------------------------------------------

TINY = (
    "model.layers=2 model.dim=32 model.heads=4 model.hidden=48 model.vocab_size=37 mtp=on mtp.depth=2 run.device=cuda "
    "batch.global_size=8 batch.micro_size=2 batch.sequence_length=16"
)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("words", ["model.tied=true", "model.tied=false run.loss_chunk=8"])
def test_the_head_keeps_what_the_closed_form_says(words, depth):
    case = case_of(
        compose_one([*TINY.split(), "parallel=tp", "launch.processes=1", f"mtp.depth={depth}", *words.split()])
    )
    model = construct(case.tree).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    batch = whole_sequences(torch.arange(32).view(2, 16) % 37)
    hidden = model.embed(batch).detach().requires_grad_()
    known = [*model.parameters(), batch.position, batch.targets]
    found, sizes = bytes_kept(known, lambda: model.head(hidden, batch)), activations.sizes_of(case, gpu=False)
    told = activations.head(case, sizes)
    rows = 8 if "chunk" in words else 32
    in_backward = rows * 37 * 4 * (2 if "chunk" in words else 1) + 2 * rows * 37 * 4  # logits, or their gradient alone
    angles = of_angles([case.blocks[1]], sizes)
    assert found == told["activations"] + told["logits"] - in_backward + angles


def test_what_is_not_counted_is_refused_by_name():
    """The planner asks the same; one process and ddp count it."""
    with pytest.raises(UserError, match=r"what head\.mtp\.\*\.block sends, .* is not counted on this layout"):
        explained(compose_one([*TINY.split(), "parallel=fsdp", "launch.processes=4"]))
    with pytest.raises(UserError, match="To plan without it, mtp=off; parallel=single and parallel=ddp count it"):
        explained(compose_one([*TINY.split(), "moe=on", "moe.experts=4", "parallel=fsdp", "launch.processes=4"]))
    run, mesh = compose_one([*TINY.split(), "parallel=ddp", "launch.processes=2"]), Mesh.of({"dp_replicate": 2})
    plain = replace(run, edits={})
    found, before = (one.parallel.explain(one, mesh).ranks[0] for one in (run, plain))
    more = parameter_count(compose_model(run)[0]) - parameter_count(compose_model(plain)[0])
    assert found.parameters - before.parameters == more > 0
    assert found.bytes["gradients"] - before.bytes["gradients"] == 4 * more
    assert found.bytes["logits"] - before.bytes["logits"] == 2 * 32 * (37 * 4 + 4 + 9)
