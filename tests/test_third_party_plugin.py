"""Third-party plugin with new nested groups: it trains and resumes without changes in other packages."""

from __future__ import annotations

import json
from dataclasses import replace

import yaml
from pages import ROOT, Block, Reader

PROJECT = """
[project]
name = "gangline-weather"
version = "0.3"

[project.entry-points."gangline.v1"]
weather = "gangline_weather"
"""

MODULE = """
from dataclasses import dataclass, field

from gangline import Part, hookimpl
from gangline.config.schema import PartConfig, TrackConfig
from gangline.plugin.registry import build
from gangline.track import Tracker


@dataclass
class Wind(PartConfig):
    knots: int = 5


@dataclass
class Gusts(Wind):
    share: float = 0.5  # of the time


@dataclass
class Rain(PartConfig):
    mm: float  # must be given
    wind: Wind = field(default_factory=Wind)


@dataclass
class Diary(TrackConfig):
    path: str = "diary.txt"


def rain(config, run):
    return f"{config.mm:g} mm, {build(config.wind, run)}"


def wind(config, run):
    return f"{config.knots} knots" + (f" for {config.share:g} of the time" if isinstance(config, Gusts) else "")


class DiaryTracker(Tracker):
    def __init__(self, config, run):
        self.path, self.weather = config.path, build(run.extra["weather"], run)

    def record(self, record):
        with open(self.path, "a") as file:
            file.write(f"day {record.step}: {self.weather}\\n")


@hookimpl
def gangline_parts():
    here = "gangline_weather"
    yield Part(group="weather", name="rain", config=Rain, build=f"{here}:rain", summary="Wet", opens={"wind": "calm"})
    yield Part(group="weather/wind", name="calm", config=Wind, build=f"{here}:wind", summary="Some")
    yield Part(group="weather/wind", name="gusts", config=Gusts, build=f"{here}:wind", summary="Much, at times")


@hookimpl
def gangline_trackers():
    build = "gangline_weather:DiaryTracker"
    yield Part(name="diary", config=Diary, build=build, summary="Writes a diary", reads=("weather",))
"""


def test_third_party_nested_groups_train_and_resume(tmp_path):
    reader = Reader(tmp_path)
    (reader.directory / "gangline_weather.py").write_text(MODULE)
    (reader.directory / "pyproject.toml").write_text(PROJECT)
    block = Block(ROOT / "tests" / "test_third_party_plugin.py", 1, "bash", "", "")

    def run(command: str, code: int = 0) -> str:
        return reader._run(replace(block, text=command), command, code)

    run("pip install -e .")
    assert "weather.mm is required" in run("train recipe=quick weather=rain", code=2)
    assert "there is no option weather.wind.share" in run(
        "train weather=rain weather.mm=1 weather.wind.share=1", code=2
    )
    chosen = "weather=rain weather.mm=3 weather/wind=gusts weather.wind.knots=40"
    assert "weather=rain has no effect in this run" in run(f"train recipe=quick {chosen}", code=2)
    run(f"train recipe=quick {chosen} 'track=[diary,jsonl]' run.steps=2 run.dir=out parallel=ddp")
    run("train resume=out run.steps=3")
    diary = (reader.directory / "diary.txt").read_text().splitlines()
    assert diary == [f"day {day}: 3 mm, 40 knots for 0.5 of the time" for day in (1, 2, 3)]
    config = yaml.safe_load((reader.directory / "out" / "config.yaml").read_text())
    assert config["parts"]["weather"] == "rain"
    assert config["parts"]["weather/wind"] == "gusts"
    assert config["weather"] == {"mm": 3.0, "wind": {"knots": 40, "share": 0.5}}
    supplied = json.loads((reader.directory / "out" / "parts.json").read_text())
    assert supplied["weather/wind"] == {"part": "gusts", "distribution": "gangline-weather", "version": "0.3"}
