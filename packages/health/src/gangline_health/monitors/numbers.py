"""Monitor of loss and gradient norm: judges a step before its update is applied. Torch-free.

A step is compared with recent steps without a spike, in robust standard deviations of the loss and of the logarithm of
the gradient norm, whose distribution has a long tail. If batches vary a lot (few tokens, a data mixture), the median
does not describe the tail, so a spike must also exceed twice the largest rise between consecutive steps. Spikes are not
added to the window; after several isolated spikes in one window, rises of that size are treated as normal. The
optimizer of OLMo 2 skips steps by such a criterion (arXiv 2501.00656, section 3). A lasting spike triggers a rollback,
as in PaLM (arXiv 2204.02311, section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gangline.health import Action, Verdict
from gangline_health.config import NumbersOptions
from gangline_health.monitors.base import Monitor
from gangline_health.robust import RECENT, compute_centre, compute_deviation, compute_largest_rise

if TYPE_CHECKING:
    from gangline.record import StepRecord

LEAST_LOSS = 0.01  # lower bound on the estimated standard deviation of the loss, as a share of its recent median
# Lower bound on the estimated standard deviation of the log gradient norm. With the default `gradient_spike` of 10, a
# spike is therefore at least exp(10 * 0.15) = 4.5 times the recent median norm.
LEAST_LOG_NORM = 0.15
FARTHER = 2.0  # minimum ratio of a spike's rise above the median to the largest rise between consecutive steps
SURPRISE = 100.0  # loss sum of one unpredictable sentence, in nats: a smaller rise of a batch's loss sum is not a spike
SEVERAL = 4  # number of isolated spikes in one window after which rises of that size are treated as normal
ROUTINE = 24  # number of consecutive non-finite steps not reported while the loss scale is searched for


class NumbersMonitor(Monitor):
    """Monitor that keeps a window of losses and log gradient norms, and counts consecutive verdicts of each kind."""

    name = "numbers"

    def __init__(self, options: NumbersOptions, scaled: bool = False, tokens: int | None = None) -> None:
        """Create the monitor. scaled: whether a loss scale is searched for; tokens: tokens per step, None: unknown."""
        self.options = options
        self.one_sentence = SURPRISE / tokens if tokens else 0.0
        self.routine = ROUTINE if scaled else 0  # maximum consecutive non-finite steps that are not reported
        self.losses: list[float] = []
        self.norms: list[float] = []  # logarithms of gradient norms
        self.rows: dict[str, int] = {}  # kind of verdict -> number of consecutive steps with it
        self.best: tuple[float, float, int] | None = None  # (lowest median loss, its noise, its step)
        self.found: set[str] = set()  # kinds of verdicts on the current step
        self.once: dict[str, float] = {}  # kind -> height above the centre of a spike just begun
        self.alone: dict[str, list[tuple[int, float]]] = {}  # kind -> isolated spikes: (step, height above centre)

    def describe(self) -> str:
        limits = f"loss above {self.options.spike:g} and gradient norm above {self.options.gradient_spike:g} deviations"
        return f"{limits}, divergence, {self.options.zero_steps} steps of zero gradients, NaN or inf"

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def before_update(self, step: int, loss: float, grad_norm: float) -> Iterable[Verdict]:
        self.found = set()
        if len(self.losses) >= self.options.warmup:
            least = LEAST_LOSS * abs(compute_centre(self.losses))
            yield from self._find_spike("loss-spike", step, loss, self.losses, least, self.options.spike)
        if grad_norm > 0 and len(self.norms) >= self.options.warmup:
            limit = self.options.gradient_spike
            yield from self._find_spike("gradient-spike", step, grad_norm, self.norms, LEAST_LOG_NORM, limit)

    def _find_spike(
        self, kind: str, step: int, value: float, window: list[float], least: float, limit: float
    ) -> Iterable[Verdict]:
        logarithmic = window is self.norms
        middle, noise = compute_centre(window), max(compute_deviation(window), least)
        if not noise:  # the loss is 0 in every step, as without valid tokens: there is no noise to compare with
            return
        above = (math.log(value) if logarithmic else value) - middle
        far = above / noise
        if far <= limit or above <= FARTHER * max(compute_largest_rise(window), self._get_usual_rise(kind, step)):
            return
        if not logarithmic and above <= self.one_sentence:
            return
        self.found.add(kind)
        row = self.rows.get(kind, 0) + 1
        if logarithmic:
            usual = f"gradient norm {value:.4g}, recent median {math.exp(middle):.4g}"
        else:
            usual = f"loss {value:.4g}, recent median {middle:.4g}"
        evidence = f"{usual}: {far:.1f} robust deviations above the median; consecutive spikes: {row}"
        details = {"step": step, "row": row, "first": step - row + 1, "score": far}
        yield Verdict(kind, f"step {step}", 1.0, evidence, Action.SKIP, details=details)

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        kinds, self.found = self.found, set()
        if not record.finite:
            kinds.add("not-finite")
        if record.grad_norm == 0:
            kinds.add("zero-gradients")
        self.rows = {kind: self.rows.get(kind, 0) + 1 for kind in sorted(kinds)}
        if not record.finite:
            if self.rows["not-finite"] > self.routine:
                yield self._report_not_finite(record)
            return
        self.losses = self._extend_window("loss-spike", record.step, record.loss, self.losses)
        if record.grad_norm > 0:
            self.norms = self._extend_window("gradient-spike", record.step, math.log(record.grad_norm), self.norms)
        if self.rows.get("zero-gradients") == self.options.zero_steps:
            row = self.options.zero_steps
            evidence = f"the gradient norm was 0 for {row} consecutive steps: the model does not learn"
            details = {"step": record.step, "row": row, "first": record.step - row + 1}
            yield Verdict("zero-gradients", f"step {record.step}", 1.0, evidence, Action.WARN, details=details)
        yield from self._find_divergence(record)

    def _extend_window(self, kind: str, step: int, value: float, window: list[float]) -> list[float]:
        """Return the window extended by this step, unless it is a spike; store a single spike in `alone`."""
        row, once = self.rows.get(kind, 0), self.once.pop(kind, None)
        if row == 0:
            if once is not None:
                self.alone[kind] = [*self._list_recent_spikes(kind, step), (step - 1, once)]
            return [*window, value][-self.options.window :]
        if row == 1:
            self.once[kind] = value - compute_centre(window)
        return window

    def _list_recent_spikes(self, kind: str, step: int) -> list[tuple[int, float]]:
        return [one for one in self.alone.get(kind, ()) if step - self.options.window <= one[0] < step]

    def _get_usual_rise(self, kind: str, step: int) -> float:
        """Return the height that at least `SEVERAL` single spikes in the window reached; 0.0 if there are fewer."""
        rises = sorted((above for _, above in self._list_recent_spikes(kind, step)), reverse=True)
        return rises[SEVERAL - 1] if len(rises) >= SEVERAL else 0.0

    def _report_not_finite(self, record: StepRecord) -> Verdict:
        """Return the verdict on a non-finite step; it overrides the verdict of core, which would stop the run."""
        row = self.rows["not-finite"]
        evidence = (
            f"loss {record.loss}, gradient norm {record.grad_norm}; consecutive non-finite steps: {row}; "
            "the weights are unchanged"
        )
        details = {"step": record.step, "row": row, "first": record.step - row + 1}
        return Verdict(
            "not-finite", f"step {record.step}", 1.0, evidence, Action.SKIP, overrides=("not-finite",), details=details
        )

    def _find_divergence(self, record: StepRecord) -> Iterable[Verdict]:
        """Yield a verdict if the recent median loss is far above its minimum, in units of the noise at the minimum."""
        if len(self.losses) < max(self.options.warmup, RECENT):
            return
        recent = compute_centre(self.losses)
        noise = max(compute_deviation(self.losses), LEAST_LOSS * abs(recent))
        if noise and (self.best is None or recent < self.best[0]):
            self.best = (recent, noise, record.step)
        if self.best is None:
            return
        best, then, at = self.best
        far = (recent - best) / then
        if far > self.options.divergence:
            evidence = (
                f"the median loss of the last {RECENT} steps is {recent:.4g}, {far:.1f} robust deviations above its "
                f"minimum {best:.4g} at step {at}"
            )
            details = {"step": record.step, "first": at, "row": record.step - at}
            yield Verdict("divergence", f"step {record.step}", 0.9, evidence, Action.WARN, details=details)

    # --- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "norms": self.norms,
            "rows": self.rows,
            "once": self.once,
            "alone": {kind: [list(one) for one in spikes] for kind, spikes in self.alone.items()},
            "best": list(self.best) if self.best else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.losses, self.norms = list(state.get("losses", ())), list(state.get("norms", ()))
        self.rows, self.found = dict(state.get("rows", {})), set()
        self.once = dict(state.get("once", {}))
        self.alone = {kind: [(int(at), far) for at, far in spikes] for kind, spikes in state.get("alone", {}).items()}
        best = state.get("best")
        self.best = (float(best[0]), float(best[1]), int(best[2])) if best else None
