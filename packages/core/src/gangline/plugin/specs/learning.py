"""Hooks of optimizers and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.plugin.hooks import hookspec
from gangline.plugin.parts import Part


@hookspec
def gangline_optimizers() -> Iterable[Part]:
    """Offer optimizers. Users choose one: ``optimizer=<name>``.

    ::

        # gangline_signum.py: updates along the sign of the mean gradient, softened near 0. train optimizer=signum
        # (Bernstein et al., arXiv 1802.04434)
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.config import OptimizerConfig, ShareBelowOne


        @dataclass
        class Signum(OptimizerConfig):
            momentum: ShareBelowOne = 0.9  # decay of the moving average of gradients


        def build(config, run, runtime):
            import torch

            from gangline.optimizer import Optimizer
            from gangline_basics.optimizer.pieces import state_shard
            from gangline.shard import name_model_array

            class SignumOptimizer(Optimizer):
                def __init__(self):
                    pieces = [(named.name, piece) for named in runtime.parameters() for piece in named.pieces]
                    self.pieces = [(name, piece, torch.zeros_like(piece.tensor.detach())) for name, piece in pieces]
                    arrays = [name_model_array(name) for name in runtime.names()]
                    self.registry = runtime.registry.add_like("optimizer/mean", arrays)

                @torch.no_grad()
                def step(self, learning_rate):
                    for _, piece, mean in self.pieces:
                        mean.lerp_(piece.tensor.grad, 1 - config.momentum)
                        piece.tensor.sub_(learning_rate * mean / (mean.abs() + 1e-6))

                def shards(self):  # the state is sharded like the rank's parameters
                    return [state_shard("mean", *piece) for piece in self.pieces]

            return SignumOptimizer()


        @hookimpl
        def gangline_optimizers():
            yield Part(name="signum", config=Signum, build="gangline_signum:build", summary="Updates along signs")
    """
    return ()


@hookspec
def gangline_schedules() -> Iterable[Part]:
    """Offer learning-rate schedules. Users choose one: ``schedule=<name>``.

    ::

        # gangline_rsqrt.py: decay by the inverse square root of the step. train schedule=rsqrt schedule.power=0.4
        # (Vaswani et al., arXiv 1706.03762, section 5.3)
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.config import PositiveFloat, ScheduleConfig


        @dataclass
        class Rsqrt(ScheduleConfig):
            power: PositiveFloat = 0.5  # exponent of the decay after the warmup


        def build(config, run):
            top = config.count_warmup_steps(run) + 1
            return lambda step: min((step + 1) / top, (top / (step + 1)) ** config.power)


        @hookimpl
        def gangline_schedules():
            yield Part(name="rsqrt", config=Rsqrt, build="gangline_rsqrt:build", summary="Falls as 1/root")
    """
    return ()
