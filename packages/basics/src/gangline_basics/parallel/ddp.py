"""Data parallelism: the whole model on every rank, gradients added over the ranks."""

from __future__ import annotations

from torch import Tensor, nn

from gangline.comm.base import Comms
from gangline.config.schema import Run
from gangline.mesh import Mesh
from gangline.plan import Plan
from gangline.precision import Precision
from gangline_basics.parallel.buckets import Buckets
from gangline_basics.parallel.config import Ddp
from gangline_basics.parallel.whole_runtime import Finish, WholeRuntime


class DdpRuntime(WholeRuntime):
    """Adds each bucket of gradients over the ranks while the last microbatch's backward pass goes on."""

    def __init__(
        self,
        config: Ddp,
        run: Run,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        comms: Comms,
        precision: Precision,
        finish: Finish,
    ) -> None:
        super().__init__(run, model, plan, mesh, comms, precision, finish)
        self._buckets = Buckets(
            [self.storage.used[name] for name in self.storage.trained],
            self.comm,
            int(config.bucket_mb * 2**20),
            precision.grad_dtype,
            precision.reduce_dtype,
        )

    def _before_backward(self, microbatch: int, last: int) -> None:
        if microbatch == last:
            self._buckets.begin_last()

    def _reduced(self) -> list[Tensor]:
        self._buckets.finish()
        return self.storage.assign_gradients()


def build(
    config: Ddp, run: Run, model: nn.Module, plan: Plan, mesh: Mesh, comms: Comms, precision: Precision, finish: Finish
) -> DdpRuntime:
    """The strategy `ddp`."""
    return DdpRuntime(config, run, model, plan, mesh, comms, precision, finish)
