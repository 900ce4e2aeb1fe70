"""Pipeline executor against torch.distributed.pipelining: bit-identical for 1F1B and interleaved 1F1B."""

from __future__ import annotations

import copy

import pytest
import torch

from gangline.mesh import Mesh
from gangline.model.linear import Linear
from gangline.model.linear_nodes import LinearNode
from gangline_parallel_megatron_style.pipeline.executor import Executor
from gangline_parallel_megatron_style.pipeline.rank_stages import RankStages
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

DIM, ROWS = 8, 3


class Chain(RankStages):
    """Stages of linear layers with tanh; the loss is the squared distance to a target."""

    def __init__(self, layers, stages, last, xs, ys):
        super().__init__()
        self.layers, self.stages, self.last, self.xs, self.ys = layers, stages, last, xs, ys

    def forward(self, chunk, microbatch, hidden):
        out = torch.tanh(self.layers[chunk](self.xs[microbatch] if hidden is None else hidden))
        return distance(out, self.ys[microbatch]) if self.stages[chunk] == self.last else out

    def backward(self, chunk, microbatch, output, grad):
        output.backward(grad)

    def allocate_hidden(self, microbatch):
        return torch.empty(ROWS, DIM)


class Tanh(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return torch.tanh(self.layer(x))


def distance(out, target):
    return (out - target).square().sum()


def both(name, microbatches):
    from torch.distributed import pipelining

    comm = rank.make_comms(Mesh.of({"pp": rank.world})).get_comm("pp")
    generator = torch.Generator().manual_seed(5)
    xs, ys = torch.randn(2, microbatches, ROWS, DIM, generator=generator)
    made = Executor(Chain([], [], 0, xs, ys), comm, name)
    stages = [made.get_schedule(microbatches).get_stage(comm.index, chunk) for chunk in range(made.chunks)]
    count = rank.world * made.chunks
    for stage in stages:
        layer = Linear(LinearNode(in_features=DIM, out_features=DIM, bias=True))
        generator = torch.Generator().manual_seed(stage)
        for parameter in layer.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        made.stage.layers.append(layer)
    made.stage.stages, made.stage.last = stages, count - 1
    theirs = [Tanh(copy.deepcopy(layer)) for layer in made.stage.layers]
    losses = made.step(microbatches)

    parts = [
        pipelining.PipelineStage(part, stage, count, torch.device("cpu"))
        for part, stage in zip(theirs, stages, strict=True)
    ]
    if name == "1f1b":
        schedule = pipelining.Schedule1F1B(parts[0], microbatches, loss_fn=distance, scale_grads=False)
    else:
        schedule = pipelining.ScheduleInterleaved1F1B(parts, microbatches, loss_fn=distance, scale_grads=False)
    found: list[torch.Tensor] = []
    last = count - 1 in stages
    schedule.step(
        *([xs.flatten(0, 1)] if 0 in stages else []),
        **({"target": ys.flatten(0, 1), "losses": found} if last else {}),
    )
    for one, other in zip(losses, found, strict=True):
        assert one.equal(other.detach())
    for layer, part in zip(made.stage.layers, theirs, strict=True):
        for one, other in zip(layer.parameters(), part.layer.parameters(), strict=True):
            assert one.grad.equal(other.grad)
    return len(losses)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_executor_is_bit_identical_to_torch_pipelining(name):
    assert get_pool(2).run(both, name, 4) == [0, 4]
