"""Hooks of parallel strategies, gradient reductions and precisions."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.plugin.hooks import hookspec
from gangline.plugin.parts import Part


@hookspec
def gangline_parallel_strategies() -> Iterable[Part]:
    """Offer ways to shard the model and the batch over ranks. Users choose one: ``parallel=<name>``.

    ::

        # gangline_watched.py: `ddp` that reports the spread of the ranks' losses. train parallel=watched
        from dataclasses import dataclass, replace

        from gangline import Part, hookimpl
        from gangline_basics.parallel.config import Ddp


        @dataclass
        class Watched(Ddp):
            pass


        def build(config, job):
            import torch
            from gangline.comm.purpose import mark_traffic
            from gangline_basics.parallel.ddp import DdpRuntime

            class WatchedRuntime(DdpRuntime):
                def step(self, microbatches):
                    result = super().step(microbatches)
                    own = result.own_loss_sum / max(result.own_tokens, 1)
                    with mark_traffic("loss"):
                        losses = self.comm.all_gather(torch.tensor([own], device=self.device)).tolist()
                    spread = max(losses) - min(losses)
                    return replace(result, metrics={**result.metrics, "loss_spread": spread})

            return WatchedRuntime(config, job)


        @hookimpl
        def gangline_parallel_strategies():
            yield Part(name="watched", config=Watched, build="gangline_watched:build", summary="Tells losses apart")
    """
    return ()


@hookspec
def gangline_gradient_reductions() -> Iterable[Part]:
    """Offer ways to sum gradients over data-parallel ranks. Users choose one: ``gradients=<name>``.

    ::

        # gangline_halves.py: gradients are sent as float16. train parallel=ddp launch.processes=2 gradients=halves
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.config import GradientsConfig


        @dataclass
        class Halves(GradientsConfig):
            def count_sent(self, size, ranks, scatters, itemsize):
                return 2 * size * (ranks - 1)  # the complete bucket, to each other rank


        def build(config, run):
            from gangline.comm.ordered import Later, sum_rows
            from gangline.gradients import GradientReduction

            class HalvesReduction(GradientReduction):
                def reduce(self, bucket, comm):
                    every = comm.start_all_gather(bucket.flat.half())
                    return Later(every, lambda rows: sum_rows(rows.view(comm.size, -1).to(bucket.flat.dtype)))

            return HalvesReduction()


        @hookimpl
        def gangline_gradient_reductions():
            yield Part(
                name="halves",
                config=Halves,
                build="gangline_halves:build",
                summary="Gradients are summed in float16",
                layout_dependent="each rank's gradients are rounded to float16",
            )
    """
    return ()


@hookspec
def gangline_precisions() -> Iterable[Part]:
    """Offer number formats to compute with. Users choose one: ``precision=<name>``.

    ::

        # gangline_coarse.py: float32, with inputs of matmuls rounded to bfloat16. train precision=coarse
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.config import PrecisionConfig


        @dataclass
        class Coarse(PrecisionConfig):
            weights_too: bool = True  # whether weights are rounded as well as inputs


        def build(config, run):
            import torch

            from gangline.precision import Precision

            class CoarsePrecision(Precision):
                param_dtype = compute_dtype = reduce_dtype = grad_dtype = torch.float32

                def linear(self, x, w, b=None):
                    w = w.bfloat16().float() if config.weights_too else w
                    return torch.nn.functional.linear(x.bfloat16().float(), w, b)

            return CoarsePrecision()


        @hookimpl
        def gangline_precisions():
            yield Part(name="coarse", config=Coarse, build="gangline_coarse:build", summary="Rounding before matmuls")
    """
    return ()
