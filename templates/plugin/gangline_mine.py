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
