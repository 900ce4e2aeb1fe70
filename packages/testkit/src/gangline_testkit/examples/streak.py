# gangline_streak.py: how many steps in a row were applied, as a metric that outlives a resume
# train callback=[streak]
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.callback import Callback
from gangline.config import CallbackConfig, PositiveInt


@dataclass
class Streak(CallbackConfig):
    at_most: PositiveInt = 1000  # where it begins anew


class StreakCallback(Callback):
    def __init__(self, config, run):
        self.at_most, self.length = config.at_most, 0

    def state(self):  # travels in the checkpoint; the same on all ranks
        return {"length": self.length}

    def load_state(self, state):
        self.length = state["length"]

    def after_step(self, record, applied):
        self.length = (self.length + 1) % self.at_most if applied else 0
        return {"length": float(self.length)}


@hookimpl
def gangline_parts():
    yield Part(
        group="callback",
        name="streak",
        config=Streak,
        build="gangline_streak:StreakCallback",
        summary="Counts steps that were applied",
    )
