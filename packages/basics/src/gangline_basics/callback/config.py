"""Configurations of the built-in callbacks. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Lt

from gangline.config.ranges import NonNegativeInt, PositiveInt
from gangline.config.schema import CallbackConfig
from gangline.errors import Problem, UserError
from gangline.plugin.parts import Part

if TYPE_CHECKING:
    from gangline.config.schema import Run


Decay = Annotated[float, Gt(0), Lt(1)]


@dataclass
class Ema(CallbackConfig):
    """EMA of the weights from step 1 on, with any optimizer; saved as arrays `callback/ema/<decay>/<parameter>`."""

    decays: list[Decay] = field(default_factory=lambda: [0.999])  # decay d of each EMA, which spans about 1/(1-d) steps
    validate: bool = True  # validation with each EMA of the weights, in addition to the run's own weights

    def count_copies(self, run: Run) -> int:
        return len(self.decays)

    def check(self, run: Run) -> list[Problem]:
        problems = []
        if not self.decays:
            problems.append(
                Problem(
                    "callback.ema.decays is empty.",
                    "",
                    "Set callback.ema.decays=[0.999], or remove ema from callback=[...].",
                )
            )
        twice = sorted({decay for decay in self.decays if self.decays.count(decay) > 1})
        if twice:
            problems.append(Problem(f"callback.ema.decays contains {twice[0]} twice; list each decay once."))
        return problems


@dataclass
class Profile(CallbackConfig):
    """torch.profiler traces of chosen steps, in `RUN_DIR/profile/`, for Perfetto, chrome://tracing and TensorBoard."""

    # steps to trace, from 1; consecutive steps share a trace file
    steps: list[PositiveInt] = field(default_factory=lambda: [10])
    ranks: list[NonNegativeInt] = field(default_factory=lambda: [0])  # global ranks that write a trace
    memory: bool = True  # memory allocated by each operator; on a GPU also a memory snapshot for pytorch.org/memory_viz
    shapes: bool = False  # input shapes of each operator in the trace
    stacks: bool = False  # Python stack trace of each operator in the profile

    def check(self, run: Run) -> list[Problem]:
        return list(self._find_problems(run))

    def _find_problems(self, run: Run) -> Iterator[Problem]:
        from gangline.config.check import count_ranks

        if not self.steps or not self.ranks:
            yield Problem(
                "callback=profile would write no trace.",
                "",
                "Set callback.profile.steps=[10] callback.profile.ranks=[0], or remove profile from callback=[...].",
            )
        beyond = [step for step in self.steps if step > run.steps]
        if beyond:
            yield Problem(f"callback.profile.steps contains {beyond[0]}, but the run has only steps 1 to {run.steps}.")
        try:
            world = count_ranks(run)
        except UserError:
            return  # another check reports an invalid layout
        absent = [rank for rank in self.ranks if rank >= world]
        if absent:
            yield Problem(f"callback.profile.ranks contains {absent[0]}, but the run has only ranks 0 to {world - 1}.")


PARTS = (
    Part(
        name="ema",
        config=Ema,
        build="gangline_basics.callback.ema:EmaCallback",
        summary="exponential moving averages of the weights, to validate, sample and export",
    ),
    Part(
        name="profile",
        config=Profile,
        build="gangline_basics.callback.profile:ProfileCallback",
        summary="traces and memory snapshots of chosen steps, for Perfetto and TensorBoard",
    ),
)
