"""Hooks of launchers, and of simulators of failures."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.plugin.hooks import hookspec
from gangline.plugin.parts import Part


@hookspec
def gangline_launchers() -> Iterable[Part]:
    """Offer ways to start the processes of a run. Users choose one: ``launch=<name>``.

    ::

        # gangline_timed.py: processes on this machine, and their wall time. train launch=timed
        import time
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.config import NonNegativeInt
        from gangline_basics.launch.config import LocalLaunch


        @dataclass
        class Timed(LocalLaunch):
            digits: NonNegativeInt = 1  # number of decimals of the printed wall time in seconds


        def build(config, run):
            from gangline_basics.launch.local import LocalLauncher

            class TimedLauncher(LocalLauncher):
                def launch(self, directory):
                    began = time.monotonic()
                    code = super().launch(directory)
                    print(f"took {time.monotonic() - began:.{config.digits}f} s, exit code {code}")
                    return code

            return TimedLauncher(config, run)


        @hookimpl
        def gangline_launchers():
            yield Part(name="timed", config=Timed, build="gangline_timed:build", summary="Prints the wall time")
    """
    return ()


@hookspec
def gangline_simulators() -> Iterable[Part]:
    """Offer simulators of failures. Users choose one: ``gangline health simulate --simulator <name>``.

    ::

        # gangline_expected.py: mean cost of failures, in closed form. gangline health simulate --simulator expected
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.config import SimulatorConfig
        from gangline.explain.reliability import DAY, FailureSimulator, SimulatedTime


        @dataclass
        class Expected(SimulatorConfig):
            pass


        class ExpectedSimulator(FailureSimulator):
            def __init__(self, config):
                pass

            def simulate(self, job):
                wall = job.days * DAY
                steps = wall * job.reliability.compute_ettr(job.every)
                saves = steps / job.every * job.save_seconds
                seconds = {"compute": steps, "checkpoint_stall": saves, "recovery": wall - steps - saves}
                faults = round(wall / job.reliability.mtbf_seconds)
                return SimulatedTime(wall_seconds=wall, seconds=seconds, faults=faults, fewest_spares=job.spares)


        @hookimpl
        def gangline_simulators():
            build = "gangline_expected:ExpectedSimulator"
            yield Part(name="expected", config=Expected, build=build, summary="Mean cost in closed form")
    """
    return ()
