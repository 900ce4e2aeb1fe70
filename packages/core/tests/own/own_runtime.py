"""Model, strategy, precision and optimizer of `own_parts`.

B sequences, T tokens, V vocabulary
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from gangline.mesh import Mesh
from gangline.model.build import materialise
from gangline.optimizer import Optimizer
from gangline.precision import Precision
from gangline.runtime import ParamShard, Runtime, ShardedParam, StepResult
from gangline.shard import Layout, Registry, Shard


class Table(nn.Module):
    """Module that maps a batch to the loss summed over its valid targets."""

    def __init__(self, node):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.vocab_size, node.vocab_size))

    def forward(self, batch):
        logits_BTV = self.weight[batch.tokens]
        losses = F.cross_entropy(logits_BTV.flatten(0, 1), batch.targets.flatten(), reduction="none")
        return (losses * batch.loss_mask.flatten()).sum()


class AloneRuntime(Runtime):
    """Runtime of one process that holds the complete model."""

    rank, data_coordinate = 0, (0, 1)

    def __init__(self, config, job):
        self.model = materialise(job.model, job.plan, device=job.comms.device, dtype=job.precision.param_dtype)
        shape = tuple(self.model.weight.shape)
        self.registry = Registry.of(Mesh.of({}), {"model/weight": Layout(shape, "float64")})
        self.shard = Shard("model/weight", shape, torch.float64, (0, 0), self.model.weight.detach())

    def step(self, microbatches):
        tokens = sum(int(batch.loss_mask.sum()) for batch in microbatches)
        self.model.zero_grad()
        losses = [self.model(batch) for batch in microbatches]
        (sum(losses) / tokens).backward()
        total = float(sum(loss.detach() for loss in losses))
        return StepResult(total, tokens, math.isfinite(total), {}, total, tokens)

    @torch.no_grad()
    def evaluate(self, microbatches):
        losses = [float(self.model(batch)) for batch in microbatches]
        return sum(losses), sum(int(batch.loss_mask.sum()) for batch in microbatches)

    @torch.no_grad()
    def score(self, batches, losses_per_sample=1):
        return -torch.stack([self.model(batch) for batch in batches]).double()

    def clip(self, max_norm):
        norm = self.model.weight.grad.norm()
        if max_norm is not None and norm > max_norm:
            self.model.weight.grad.mul_(max_norm / norm)
        return float(norm)

    def parameters(self):
        return [ShardedParam("weight", self.shard.global_shape, (ParamShard(self.model.weight, self.shard),))]

    def map_matrices(self, function, inputs):
        raise NotImplementedError("descent maps no matrices")

    def find_matrix_owners(self, names):
        return {}

    def shards(self):
        return [self.shard]

    def finish_update(self):
        pass


class ExactPrecision(Precision):
    param_dtype = compute_dtype = reduce_dtype = grad_dtype = torch.float64

    def linear(self, x, w, b=None):
        return F.linear(x, w, b)


def exact(config, run):
    return ExactPrecision()


class DescentOptimizer(Optimizer):
    """Plain gradient descent without optimizer state."""

    def __init__(self, config, run, runtime):
        self.runtime, self.registry = runtime, Registry(runtime.registry.mesh)

    @torch.no_grad()
    def step(self, learning_rate):
        for parameter in self.runtime.parameters():
            for piece in parameter.pieces:
                piece.tensor.sub_(learning_rate * piece.tensor.grad)

    def shards(self):
        return []
