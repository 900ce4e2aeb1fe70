"""Hooks by which a plugin adds its own groups, commands and kinds of plugins."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.plugin.hooks import Command, Kind, hookspec
from gangline.plugin.parts import Part


@hookspec
def gangline_parts() -> Iterable[Part]:
    """Offer parts of groups that the plugin opens. Users choose one: ``<group>=<name>``.

    A part of another group, which the same plugin or another plugin offers, reads the choice.

    ::

        # gangline_greeting.py: a group, and a tracker that reads the choice. train greeting=plain 'track=[greeting]'
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.config import PartConfig, TrackConfig
        from gangline.plugin.registry import build
        from gangline.track import Tracker


        @dataclass
        class Greeting(PartConfig):
            words: str = "hello"  # greeting before the name of the run


        def plain(config, run):  # the contract of the group: build(config, run) returns a function of a name
            return lambda name: f"{config.words}, {name}"


        @dataclass
        class GreetingTrack(TrackConfig):
            pass


        class GreetingTracker(Tracker):
            def __init__(self, config, run):
                chosen = run.extra.get("greeting")  # None where the user chose greeting=off
                self.greet = build(chosen, run) if chosen else str

            def begin(self, start):
                print(self.greet(start.name))

            def record(self, record):
                pass


        @hookimpl
        def gangline_parts():
            about = {"config": Greeting, "build": "gangline_greeting:plain", "summary": "Plain words"}
            yield Part(group="greeting", name="plain", **about)


        @hookimpl
        def gangline_trackers():
            about = {"config": GreetingTrack, "build": "gangline_greeting:GreetingTracker", "summary": "Greets"}
            yield Part(name="greeting", reads=("greeting",), **about)
    """
    return ()


@hookspec
def gangline_commands() -> Iterable[Command]:
    """Offer commands. Users type: ``gangline <name>``.

    ::

        # gangline_listing.py: list the runs of a folder. gangline listing
        import argparse
        from pathlib import Path

        from gangline import Command, hookimpl


        def main(argv):
            parser = argparse.ArgumentParser(prog="gangline listing", description="List the runs of a folder.")
            parser.add_argument("folder", nargs="?", default="runs")
            for path in sorted(Path(parser.parse_args(argv).folder).glob("*/config.yaml")):
                print(path.parent)
            return 0


        @hookimpl
        def gangline_commands():
            yield Command(name="listing", run="gangline_listing:main", summary="List the runs of a folder")
    """
    return ()


@hookspec
def gangline_kinds() -> Iterable[Kind]:
    """Offer kinds of plugins to start from. Authors choose one: ``gangline new-plugin <plugin> --kind <name>``.

    An example is a complete plugin; `gangline new-plugin` renames it. Core's own kinds are in gangline-testkit.

    ::

        # gangline_starts.py: one more template of a plugin. gangline new-plugin mine --kind whisper
        from gangline import Kind, hookimpl

        EXAMPLE = '''
            # gangline_whisper.py: print a lower-case line for each step. train track=[whisper]
            from dataclasses import dataclass
            from gangline import Part, hookimpl
            from gangline.config import TrackConfig
            from gangline.track import Tracker

            @dataclass
            class Whisper(TrackConfig):
                pass

            class WhisperTracker(Tracker):
                def __init__(self, config, run): ...
                def record(self, record): print(f"step {record.step}: {record.loss:.2f}")

            @hookimpl
            def gangline_trackers():
                build = "gangline_whisper:WhisperTracker"
                yield Part(name="whisper", config=Whisper, build=build, summary="Small letters")
            '''

        @hookimpl
        def gangline_kinds():
            where = {"suite": "gangline_testkit:TrackerSuite", "example": "gangline_starts:EXAMPLE"}
            yield Kind(name="whisper", group="track", **where, summary="a quiet tracker")
    """
    return ()
