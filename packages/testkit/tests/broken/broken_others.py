"""Data sources, health checks, trackers, optimizers and schedules with one fault each."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gangline.data.sample_reader import SampleReader
from gangline.health import Action, HealthCheck, Verdict
from gangline_basics.optimizer.adamw import AdamwOptimizer
from gangline_testkit.toys.lines import LinesTracker
from gangline_testkit.toys.nan import NanCheck
from gangline_testkit.toys.numbers import NumbersSource

# --- data ------------------------------------------------------------------------------------------------------------


class Repeats(NumbersSource):
    def sample(self, i):
        return super().sample(4 if i == 5 else i)


class LeavesOut(NumbersSource):
    def __init__(self, config, run, split):
        super().__init__(config, run, split)
        self.windows = self.windows[: len(self.windows) - len(self.windows) // 10]


class NoLength(NumbersSource):
    def count_samples(self):
        raise TypeError("without end")


class CallOrder(NumbersSource):
    calls = 0

    def sample(self, i):
        self.calls += 1
        return super().sample(i + self.calls)


class IgnoresSplit(NumbersSource):
    def __init__(self, config, run, split):
        super().__init__(config, run, split)
        self.windows = list(range((len(self.tokens) - 1) // self.sequence_length))


class OneFingerprint(NumbersSource):
    def compute_fingerprint(self):
        return "numbers"


class PerProcess(NumbersSource):
    def sample(self, i):
        return super().sample(i + os.getpid() % 7 + 1)


class TooShort(NumbersSource):
    def sample(self, i):
        sample = super().sample(i)
        return {"tokens": sample["tokens"][:-1]}


# --- readers ---------------------------------------------------------------------------------------------------------


class OffAfterResume(NumbersSource):
    """Starts one sample too late, unless it starts at sample 0."""

    def open_reader(self, place):
        class Reader(SampleReader):
            def begin(self, cursor, step):
                super().begin(cursor + (cursor > 0), step)

        return Reader(self, place)


class DiffersByWidth(NumbersSource):
    """Distributes the samples of a batch round-robin over the ranks, as samplers of other libraries do."""

    def open_reader(self, place):
        class Reader(SampleReader):
            def _store(self, numbers, memory, slot, counted=None):
                if counted is None:
                    size, width, first = place.global_size, place.width, self.cursor
                    step, own = divmod(numbers[0] - first - place.index * place.share, size)
                    numbers = [first + step * size + (own + n) * width + place.index for n in range(len(numbers))]
                return super()._store(numbers, memory, slot, counted)

            def begin(self, cursor, step):
                self.cursor = cursor
                super().begin(cursor, step)

        return Reader(self, place)


class ForgetsMasks(NumbersSource):
    def sample(self, i):
        sample = super().sample(i)
        sample["loss_mask"] = np.arange(len(sample["tokens"]) - 1) % 3 > 0
        return sample

    def open_reader(self, place):
        class Reader(SampleReader):
            def take(self):
                return [replace(stored, loss_mask=None) for stored in super().take()]

        return Reader(self, place)


class ReadsAfterClose(NumbersSource):
    def open_reader(self, place):
        class Reader(SampleReader):
            def close(self):
                if not self._closed:
                    self._closed = True  # the threads continue

        return Reader(self, place)


class FillsTooEarly(NumbersSource):
    """Uses the same memory for all prefetched batches."""

    def open_reader(self, place):
        class Reader(SampleReader):
            def _store(self, numbers, memory, slot, counted=None):
                return super()._store(numbers, memory, slot[1] if counted is None else slot, counted)

        return Reader(self, place)


class ValidatesByRank(NumbersSource):
    """Every rank validates on all samples, as if it were the only rank."""

    def open_reader(self, place):
        class Reader(SampleReader):
            def read_held_out(self, count):
                for numbers, counted in replace(place, index=0, width=1).iterate_held_out(
                    count, self.source.count_samples()
                ):
                    yield self._store(numbers, self._memory, "held out", counted)

        return Reader(self, place)


# --- health ----------------------------------------------------------------------------------------------------------


class Jumpy(NanCheck):
    last = float("inf")

    def observe(self, record):
        yield from super().observe(record)
        if record.loss > self.last:
            yield Verdict("loss-rose", f"step {record.step}", 0.5, f"{record.loss} after {self.last}", Action.WARN)
        self.last = record.loss


class Forgetful(NanCheck):
    def state(self):
        return {}


class Chatty(NanCheck):
    def collective(self, comm):
        self.comm = comm

    def observe(self, record):
        self.comm.all_reduce(torch.tensor([record.loss]), "max")
        return super().observe(record)


class Blind(NanCheck):
    def observe(self, record):
        return ()


class Tidy(NanCheck):
    def observe(self, record):
        record.loss = record.loss if record.finite else 0.0
        return super().observe(record)


class Proud(HealthCheck):
    """Divides by `mfu` of a record, which may be None."""

    def __init__(self, config, run):
        self.every = 1

    def observe(self, record):
        if 1 / record.mfu > 1e6:
            yield Verdict("slow", "run", 1.0, f"mfu {record.mfu}", Action.WARN)


# --- trackers --------------------------------------------------------------------------------------------------------


class NeedsMfu(LinesTracker):
    def record(self, record):
        self.best = max(getattr(self, "best", 0.0), record.mfu)
        super().record(record)


class Drops(LinesTracker):
    def record(self, record):
        if record.step % 7:
            super().record(record)


class Appends(LinesTracker):
    def forget_after(self, step):
        self.path.touch()


class Littering(LinesTracker):
    def begin(self, start):
        super().begin(start)
        Path("tracker.log").write_text("here")


class Scaling(LinesTracker):
    def record(self, record):
        record.metrics = {name: value for name, value in record.metrics.items() if isinstance(value, float)}
        super().record(record)


# --- optimizers ------------------------------------------------------------------------------------------------------


class Built(AdamwOptimizer):
    def __init__(self, config, run, runtime):
        super().__init__(config, runtime, runtime.parameters(), runtime.names(), run.deterministic)
        self.runtime = runtime


class LateState(Built):
    stepped = False

    def step(self, learning_rate):
        self.stepped = True
        super().step(learning_rate)

    def shards(self):
        return super().shards() if self.stepped else iter(())


class NoCounters(Built):
    def load_state(self, state):
        pass


class Drifts(Built):
    def step(self, learning_rate):
        super().step(learning_rate + 1e-3)


class LocalNorm(Built):
    """Divides the gradient by the norm of its local part instead of the global norm."""

    def step(self, learning_rate):
        pieces = [piece.tensor for named in self.named for piece in named.pieces]
        norm = torch.stack([tensor.grad.norm() for tensor in pieces]).norm()
        for tensor in pieces:
            tensor.grad = tensor.grad / norm
        super().step(learning_rate)


class Copies(Built):
    """Returns copies of its state as shards, so loading a checkpoint does not change the state."""

    def shards(self):
        for shard in super().shards():
            shard.local = shard.local.clone()
            yield shard


class Careless(Built):
    """Returns every array that `may_drop` gets, also arrays of an unknown state."""

    def may_drop(self, names):
        return names


# --- schedules -------------------------------------------------------------------------------------------------------


def CountsCalls(config, run):
    calls = iter(range(10**9))
    return lambda step: 1.0 / (1 + next(calls) / 1000)


def TooHigh(config, run):
    return lambda step: min((step + 1) / (config.count_warmup_steps(run) + 1), 1.0) * 1.5


def FromNothing(config, run):
    return lambda step: min(step / max(config.count_warmup_steps(run), 1), 1.0)


def WithTorch(config, run):
    return lambda step: float(torch.tensor(1.0)) if step >= config.count_warmup_steps(run) else (step + 1) / 9
