"""Summary of a run: its figure, the commands that show its curves, and the command that continues it."""

from __future__ import annotations

import signal
import sys

from gangline.config.schema import Run
from gangline.errors import UserError
from gangline.plugin import registry
from gangline.train.session import Session


def list_left_behind(s: Session, why: str) -> dict[str, str]:
    """Return the path of the figure and the commands for a run that ends because of `why`; "" if one is missing."""
    directory = s.directory.path
    ended = why == "done" or why in signal.Signals.__members__
    more = f" run.steps={2 * s.step}" if why == "done" else ""
    return {
        "figure": draw_figure(s) if ended else "",
        "curves": f"gangline report {directory} [OTHER_RUN]{_list_curves(s.run, str(directory))}" if ended else "",
        "resume": f"train resume={directory}{more}" if ended and s.saved else "",
    }


def draw_figure(s: Session) -> str:
    """Draw a figure of the run by a tracker's capability `figure`, on global rank 0; return its path, or "".

    A failure is printed and does not end the run.
    """
    if s.comms.rank != 0 or s.step == 0:
        return ""
    try:
        drawing = [(config, registry.load_capability(config, "figure")) for config in s.run.track.values()]
        paths = [draw(config, s.directory.path) for config, draw in drawing if draw]
        return str(next(filter(None, paths), ""))
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        print(f"train: cannot plot the loss: {kind}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return ""


def _list_curves(run: Run, directory: str) -> str:
    """Return third-party commands that show the trackers' files (capability `curves`), each preceded by a comma."""
    capabilities = [(config, registry.load_capability(config, "curves")) for config in run.track.values()]
    return "".join(f", {shows(config, directory)}" for config, shows in capabilities if shows)
