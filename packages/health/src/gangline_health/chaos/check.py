"""Health check `health=chaos`: injects each scheduled fault on its rank, after logging the fault in events.jsonl."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gangline.health import HealthCheck, Verdict
from gangline.pulse.write import get_current
from gangline.run.events import Events
from gangline_health.chaos import state
from gangline_health.chaos.config import ChaosHealth
from gangline_health.chaos.plan import APART, Fault, FaultsDone, plan
from gangline_health.pulses import open_readers

if TYPE_CHECKING:
    from gangline.comm.base import Comms, Store
    from gangline.config import Run
    from gangline.optimizer import Optimizer
    from gangline.record import StepRecord
    from gangline.runtime import Runtime

READS = "bad-restore"  # kind of fault that is injected when a checkpoint is read, not at a step
FULL_BYTES = 1 << 12  # maximum size of a file while a disk is full


Step = Callable[[Sequence[Any]], Any]


class ChaosCheck(HealthCheck):
    """Health check that injects faults and returns no verdict: other checks must detect the faults."""

    def __init__(self, config: ChaosHealth, run: Run) -> None:
        self.config, self.run_dir = config, run.job.dir
        self.faults = plan(config.faults, config.seconds, config.seed, list(config.kinds), list(config.at))
        self.done: FaultsDone | None = None
        self.first, self.full_until = 0.0, 0
        self.begun: int | None = None

    def attach(
        self, runtime: Runtime, optimizer: Optimizer, comms: Comms, store: Store | None, device: torch.device
    ) -> None:
        self.runtime, self.rank, self.world = runtime, comms.rank, comms.world.size
        state.now = state.Broken()

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        return ()

    def before_step(self, step: int) -> None:
        state.now.step = step
        self._end_disk_full(step)
        if self.begun is None:
            self.begun = step
        if self.run_dir is None or not self.faults:
            return
        if self.done is None:
            self.done = FaultsDone(self.run_dir)
        seconds = time.time() - self.done.began
        for fault in self.faults:
            drawn = fault.step is None
            if fault in self.done or not fault.is_due(step, seconds) or (drawn and step < self.begun + APART):
                continue
            if fault.kind == READS:
                continue
            if fault.rank % self.world == self.rank and self.done.claim(fault):
                if drawn:
                    self.begun = step
                self._inject(fault, step)
            return  # one fault at a time; other ranks see in the next step that this fault was injected

    def _inject(self, fault: Fault, step: int) -> None:
        assert self.run_dir is not None
        events = Events(self.run_dir, get_current().generation, by="chaos")
        events.write("fault", step=step, kind=fault.kind, rank=self.rank, number=fault.number)
        events.close()
        getattr(self, "_inject_" + fault.kind.replace("-", "_"))(step)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _inject_kill(self, step: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _inject_kill_agent(self, step: int) -> None:
        os.kill(self._find_owner(os.getpid()), signal.SIGKILL)

    def _inject_kill_all(self, step: int) -> None:
        others = [reader.read().pid for reader in open_readers(self.run_dir or "")]
        owners = {self._find_owner(pid) for pid in others}
        for pid in [*owners, *(pid for pid in others if pid != os.getpid()), os.getpid()]:
            os.kill(pid, signal.SIGKILL)

    def _find_owner(self, pid: int) -> int:
        for reader in open_readers(self.run_dir or ""):
            if reader.read().pid == pid:
                return reader.owner
        return os.getppid()

    def _inject_stop(self, step: int) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    # --- traffic ------------------------------------------------------------------------------------------------------

    def _inject_slow(self, step: int) -> None:
        state.now.slow_until = step + self.config.slow_steps

    def _inject_hang(self, step: int) -> None:
        state.now.hang = True

    def _inject_exception(self, step: int) -> None:
        state.now.exception = True

    def _inject_nan(self, step: int) -> None:
        state.now.nan = True

    def _inject_lost_store(self, step: int) -> None:
        state.now.store_until = time.monotonic() + self.config.store_seconds

    # --- numbers ------------------------------------------------------------------------------------------------------

    def _inject_bit_flip(self, step: int) -> None:
        """Flip one bit of a weight of this rank, in memory."""
        flip([shard.local for shard in self.runtime.shards()])

    def _inject_gradient_flip(self, step: int) -> None:
        """Flip one bit of a gradient of this rank in the next step, after gradients were summed over ranks."""

        def step_and_flip(own: Step, microbatches: Sequence[Any]) -> Any:
            result = own(microbatches)
            pieces = [piece for parameter in self.runtime.parameters() for piece in parameter.pieces]
            flip([piece.tensor.grad for piece in pieces if piece.tensor.grad is not None])
            return result

        self._replace_next_step(step_and_flip)

    def _inject_miscompute(self, step: int) -> None:
        """Change a number that this rank contributes to a sum over ranks: all ranks get the same wrong sum."""
        state.now.miscompute = True

    def _inject_bad_restore(self, step: int) -> None:
        """Flip one bit of a weight, just after the weights were read from a checkpoint."""
        flip([shard.local for shard in self.runtime.shards()])

    def load_state(self, state: dict[str, Any]) -> None:
        for fault in self.faults:
            if fault.kind != READS or self.run_dir is None or fault.rank % self.world != self.rank:
                continue
            self.done = self.done or FaultsDone(self.run_dir)
            if fault not in self.done and self.done.claim(fault):
                self._inject(fault, fault.step or 0)

    def _replace_next_step(self, instead: Callable[[Step, Sequence[Any]], Any]) -> None:
        """Replace the next call of `runtime.step` by instead(original step, microbatches)."""
        own = self.runtime.step

        def step(microbatches: Sequence[Any]) -> Any:
            self.runtime.step = own  # type: ignore[method-assign]
            return instead(own, microbatches)

        self.runtime.step = step  # type: ignore[method-assign]

    def _inject_bad_batch(self, step: int) -> None:
        """Change the tokens of this rank's next batch, as if a data shard were read at a wrong offset."""

        def change_batch(batch: Any) -> Any:
            return replace(batch, tokens=batch.tokens.flip(-1), targets=batch.targets.max() - batch.targets)

        self._replace_next_step(lambda own, microbatches: own([change_batch(batch) for batch in microbatches]))

    # --- the machine --------------------------------------------------------------------------------------------------

    def _inject_disk_full(self, step: int) -> None:
        """Make writes of this rank beyond `FULL_BYTES` per file fail, as on a full disk."""
        self.full_until = step + self.config.full_steps
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def _end_disk_full(self, step: int) -> None:
        if self.full_until and step >= self.full_until:
            self.full_until = 0
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@torch.no_grad()
def flip(tensors: Sequence[torch.Tensor]) -> None:
    """Flip the third-highest exponent bit of the first element of the first non-empty floating-point tensor."""
    flat = next(each for each in tensors if each.is_floating_point() and each.numel()).detach().view(-1)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bit = {2: 12, 4: 28, 8: 60}[flat.element_size()]
    flat[0] = flat[:1].view(words).bitwise_xor(1 << bit).view(flat.dtype)[0]
