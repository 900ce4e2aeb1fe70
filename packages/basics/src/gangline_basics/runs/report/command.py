"""`gangline report`: write a run, or a comparison of runs, as one HTML file."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from pathlib import Path

from gangline.errors import UserError
from gangline.run.files import refuse_others
from gangline.storage.files import open_regular, write_whole
from gangline_basics.figure import use_style
from gangline_basics.runs.compare import shorten_names
from gangline_basics.runs.report.history import read_history
from gangline_basics.runs.report.page import GENERATOR, build_page

FILE = "report.html"
HEAD_BYTES = 512  # number of bytes at the begin of a report that contain its generator


def main(argv: Sequence[str]) -> int:
    """Write the page and print its path. Raises UserError if a run is missing or the file cannot be written."""
    parser = argparse.ArgumentParser(
        prog="gangline report",
        description="Write a report of a run, or a comparison of several runs, as one HTML file.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run directories")
    parser.add_argument(
        "--out", metavar="FILE", help=f"path of the HTML file (default: {FILE} in the first run directory)"
    )
    options = parser.parse_args(list(argv))
    with use_style():  # refuse without matplotlib, before the files are read
        path = Path(options.out or Path(options.runs[0]) / FILE)
    refuse_other_files(path, Path(options.runs[0]) if options.out is None else None)
    gc.disable()  # a long run has millions of values without reference cycles; collections would double the time
    try:
        names = shorten_names(options.runs)
        histories = [read_history(run, name) for run, name in zip(options.runs, names, strict=True)]
        write_whole(path, build_page(histories))
    except OSError as error:
        fix = "Choose another file:  --out FILE" if path.parent.is_dir() else f"mkdir -p {path.parent}"
        raise UserError(f"{path} cannot be written.", f"{error.strerror}.", fix) from error
    finally:
        gc.enable()
    print(path)
    return 0


def refuse_other_files(path: Path, run_dir: Path | None) -> None:
    """Raise UserError if `path` would replace a file other than an earlier report of this user.

    run_dir: run directory in which the file was not requested by name; None if it was. It must belong to the user.
    """
    if run_dir is not None and run_dir.is_dir() and run_dir.stat().st_uid != os.geteuid():
        raise UserError(
            f"{run_dir} belongs to another user, so the report is not written there.",
            "Choose a file of your own:  --out FILE",
        )
    if path.is_symlink():
        raise UserError(
            f"{path} is a symbolic link to {os.readlink(path)}.",
            "A report replaces no link and follows none.",
            "Choose another file:  --out FILE",
        )
    if path.is_dir():
        raise UserError(f"{path} is a directory.", "Choose a file:  --out FILE")
    if not os.path.lexists(path):
        return
    refuse_others(path)
    try:
        with open_regular(path) as file:
            ours = GENERATOR.encode() in file.read(HEAD_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read.", f"{error.strerror}.", "Choose another file:  --out FILE") from error
    if not ours:
        raise UserError(
            f"{path} exists and is not a report of gangline.", "It would be lost.", "Choose another file:  --out FILE"
        )
