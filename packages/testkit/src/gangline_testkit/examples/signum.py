# gangline_signum.py: steps along the sign of the mean gradient, softened near 0. train optimizer=signum
# (Bernstein et al., arXiv 1802.04434)
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.config import OptimizerConfig, PositiveFloat, ShareBelowOne


@dataclass
class Signum(OptimizerConfig):
    momentum: ShareBelowOne = 0.9  # decay of the mean gradient
    softness: PositiveFloat = 1e-6  # gradients far below this step in proportion, not by their sign


def build(config, run, runtime):
    import torch

    from gangline.optimizer import Optimizer
    from gangline.shard import Shard, model_array

    class SignumOptimizer(Optimizer):
        def __init__(self):
            self.pieces = [(named.name, piece) for named in runtime.parameters() for piece in named.pieces]
            self.means = [torch.zeros_like(piece.tensor, requires_grad=False) for _, piece in self.pieces]
            # what each rank holds of the state lies as its parameters do
            self.registry = runtime.registry.like("optimizer/mean", [model_array(name) for name in runtime.names()])

        @torch.no_grad()
        def step(self, learning_rate):
            for (_, piece), mean in zip(self.pieces, self.means, strict=True):
                mean.lerp_(piece.tensor.grad, 1 - config.momentum)
                piece.tensor.sub_(learning_rate * mean / (mean.abs() + config.softness))

        def shards(self):
            for (name, piece), mean in zip(self.pieces, self.means, strict=True):
                of = piece.shard
                yield Shard(f"optimizer/mean/{name}", of.global_shape, mean.dtype, of.offset, mean, of.primary)

    return SignumOptimizer()


@hookimpl
def gangline_parts():
    yield Part(
        group="optimizer", name="signum", config=Signum, build="gangline_signum:build", summary="Steps along signs"
    )
