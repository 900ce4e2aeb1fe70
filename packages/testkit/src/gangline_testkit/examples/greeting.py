# gangline_greeting.py: a group of its own, and a tracker that builds the part chosen from it.
# train greeting=plain 'track=[console,greeting]' greeting.words=hello
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.config import PartConfig, TrackConfig
from gangline.plugin.registry import build
from gangline.track import Tracker


@dataclass
class GreetingConfig(PartConfig):
    """The base of the group, for whoever adds a part to it: `build(config, run) -> callable(name) -> text`."""

    words: str = "hello"  # what it begins with


@dataclass
class PlainGreeting(GreetingConfig):
    """The one part that is here from the start."""


def plain(config, run):
    return lambda name: f"{config.words}, {name}"


@dataclass
class GreetingTrack(TrackConfig):
    """No options."""


class GreetingTracker(Tracker):
    def __init__(self, config, run):
        chosen = run.extra.get("greeting")  # None: greeting=off, which every group of a plugin has
        self.greet = build(chosen, run) if chosen is not None else None

    def begin(self, start):
        if self.greet is not None:
            print(self.greet(start.name))

    def record(self, record):
        pass


@hookimpl
def gangline_parts():
    yield Part(
        group="greeting", name="plain", config=PlainGreeting, build="gangline_greeting:plain", summary="Plain words"
    )
    yield Part(
        group="track",
        name="greeting",
        config=GreetingTrack,
        build="gangline_greeting:GreetingTracker",
        summary="Greets as greeting=... says",
        reads=("greeting",),
    )
