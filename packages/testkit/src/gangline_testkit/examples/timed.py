# gangline_timed.py: processes on this machine, and how long they took. train launch=timed
import time
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.config import NonNegativeInt
from gangline_basics.launch.config import LocalLaunch


@dataclass
class Timed(LocalLaunch):
    digits: NonNegativeInt = 1  # of the seconds that are printed


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
def gangline_parts():
    yield Part(
        group="launch", name="timed", config=Timed, build="gangline_timed:build", summary="Says how long it took"
    )
