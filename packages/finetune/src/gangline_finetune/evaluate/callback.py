"""Callback `eval`: tasks of lm-eval during a run."""

from __future__ import annotations

from typing import Any

import torch

from gangline import UserError
from gangline.callback import Callback, Metrics
from gangline.comm.base import Comms, Store
from gangline.comm.objects import gather_json
from gangline.config import Run
from gangline.optimizer import Optimizer
from gangline.record import StepRecord
from gangline.runtime import Runtime
from gangline_finetune.evaluate.config import EvalConfig
from gangline_finetune.evaluate.live_model import LiveWriter, make_live_lm
from gangline_finetune.evaluate.tasks import Questions, flatten_results


class EvalCallback(Callback):
    """Callback in which rank 0 runs lm-eval, and all ranks compute likelihoods and generate, on any layout.

    Results are those of the weights after the step. They equal the results of `gangline eval`, which computes in
    float32, up to rounding errors of the run's precision and layout.
    """

    def __init__(self, config: EvalConfig, run: Run) -> None:
        self.config, self.run = config, run
        self.failed: Exception | None = None

    def attach(
        self, runtime: Runtime, optimizer: Optimizer, comms: Comms, store: Store | None, device: torch.device
    ) -> None:
        self.comms = comms
        self.writer = LiveWriter(self.run, runtime, comms)

    def begin(self, step: int) -> None:
        """Load the tasks. Raises an error on all ranks, before the first step, if a task cannot be evaluated."""
        config = self.config
        if self.comms.rank == 0:
            try:
                self.questions = Questions(
                    [*config.tasks, *config.files], shots=config.shots, limit=config.limit, chat=config.chat
                )
                self.model = make_live_lm(self.writer, config.batch, self.questions.find_likelihood_tasks())
                self.questions.check(self.model)
            except Exception as error:
                self.failed = error
        (why, *_) = gather_json(self.comms.world, _format_error(self.failed))
        self._raise(why)

    def after_step(self, record: StepRecord, applied: bool) -> Metrics | None:
        if record.step % self.config.every:
            return None
        answer = self._ask() if self.comms.rank == 0 else self.writer.serve()
        self._raise(answer.get("failed"))
        return answer["numbers"]

    def _ask(self) -> dict[str, Any]:
        """Run the tasks on rank 0; send the metrics, or the error before it is raised, to the waiting ranks."""
        try:
            answer: dict[str, Any] = {"numbers": flatten_results(self.questions.ask_model(self.model))}
        except Exception as error:
            if self.writer.broken:  # the other ranks have raised the error too, and do not wait
                raise
            self.failed, answer = error, {"failed": _format_error(error)}
        return self.writer.tell(answer)

    def _raise(self, why: list[str] | None) -> None:
        """Raise an error on all ranks if there is one; on rank 0 it has its original traceback."""
        if self.comms.rank == 0 and self.failed is not None:
            raise self.failed
        if why is not None:
            raise UserError(*why)


def _format_error(error: Exception | None) -> list[str] | None:
    if error is None:
        return None
    return [error.what, *error.details] if isinstance(error, UserError) else [f"{type(error).__name__}: {error}"]


def build(config: EvalConfig, run: Run) -> EvalCallback:
    """Build the callback `eval`."""
    return EvalCallback(config, run)
