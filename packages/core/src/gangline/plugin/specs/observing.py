"""Hooks of trackers, health checks and callbacks, which follow a run step by step."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.plugin.hooks import hookspec
from gangline.plugin.parts import Part


@hookspec
def gangline_trackers() -> Iterable[Part]:
    """Offer trackers, which log the records of a run. Users choose any number: ``track=[<name>,...]``.

    ::

        # gangline_mine.py: a line for each step. train 'track=[console,mine]' track.mine.word=loss
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.config import TrackConfig
        from gangline.track import Tracker


        @dataclass
        class Mine(TrackConfig):
            word: str = "mine"  # first word of each line


        class MineTracker(Tracker):
            def __init__(self, config, run):
                self.word = config.word

            def record(self, record):
                print(self.word, record.step, record.loss)


        @hookimpl
        def gangline_trackers():
            yield Part(name="mine", config=Mine, build="gangline_mine:MineTracker", summary="A line a step")
    """
    return ()


@hookspec
def gangline_health_checks() -> Iterable[Part]:
    """Offer health checks, which observe each step of a run. Users choose any number: ``health=[<name>,...]``.

    ::

        # gangline_ceiling.py: a loss above a ceiling gets a warning. train 'health=[ceiling]' health.ceiling.above=8
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.config import HealthConfig
        from gangline.health import Action, HealthCheck, Verdict


        @dataclass
        class Ceiling(HealthConfig):
            above: float = 8.0  # maximum loss without a warning, in nats


        class CeilingCheck(HealthCheck):
            def __init__(self, config, run):
                self.above = config.above

            def observe(self, record):
                if record.loss > self.above:
                    evidence = f"loss {record.loss:.3f} is above {self.above:g}"
                    yield Verdict("high-loss", f"step {record.step}", 1.0, evidence, Action.WARN)


        @hookimpl
        def gangline_health_checks():
            yield Part(name="ceiling", config=Ceiling, build="gangline_ceiling:CeilingCheck", summary="A high loss")
    """
    return ()


@hookspec
def gangline_callbacks() -> Iterable[Part]:
    """Offer callbacks, which act while a run trains. Users choose any number: ``callback=[<name>,...]``.

    ::

        # gangline_streak.py: applied steps in a row, a metric that a resume continues. train 'callback=[streak]'
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.callback import Callback
        from gangline.config import CallbackConfig, PositiveInt


        @dataclass
        class Streak(CallbackConfig):
            at_most: PositiveInt = 1000  # number of applied steps at which the count restarts


        class StreakCallback(Callback):
            def __init__(self, config, run):
                self.at_most, self.length = config.at_most, 0

            def state(self):  # stored in checkpoints; equal on all ranks
                return {"length": self.length}

            def load_state(self, state):
                self.length = state["length"]

            def after_step(self, record, applied):
                self.length = (self.length + 1) % self.at_most if applied else 0
                return {"length": float(self.length)}


        @hookimpl
        def gangline_callbacks():
            yield Part(name="streak", config=Streak, build="gangline_streak:StreakCallback", summary="Applied steps")
    """
    return ()
