"""`train -m parallel=single,ddp`: several runs, each in its own directory, and a table of their results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gangline import api
from gangline.cli import EXIT_INTERRUPTED, make_notes, open_console
from gangline.config.check import check
from gangline.config.compose import compose_one
from gangline.config.preflight import sweep
from gangline.config.schema import Run
from gangline.errors import UserError
from gangline.record import read_records
from gangline.run.directory import RunDirectory, make_fresh


@dataclass
class FinishedRun:
    """One finished run of a multirun, with its exit code."""

    number: int
    words: list[str]
    path: str
    code: int


def run_all(words: Sequence[str]) -> int:
    """Compose and check all runs of a sweep, then run them; return the exit code of the first failed run, else 0."""
    combinations = sweep(words)
    runs = [compose_one(combination) for combination in combinations]
    for run in runs:
        check(run)
    _give_directories(runs)
    if all(run.launch.at_once for run in runs):
        return _launch_together(runs, combinations, words)
    finished_runs: list[FinishedRun] = []
    for number, (run, combination) in enumerate(zip(runs, combinations, strict=True)):
        varied = [word for word in combination if word not in words]
        print(f"train: run {number + 1} of {len(runs)}: {' '.join(varied)}", file=sys.stderr)
        code = _launch_one(run, ["train", *combination])
        finished_runs.append(FinishedRun(number, varied, str(run.job.dir), code))
        if code >= EXIT_INTERRUPTED - 2:  # 128 + n: a signal ends the multirun
            break
    _print_table(finished_runs)
    return next((one.code for one in finished_runs if one.code), 0)


def _launch_together(runs: list[Run], combinations: list[list[str]], words: Sequence[str]) -> int:
    """Write all run directories, then launch them together; delete the directories if the launcher refuses."""
    directories: list[RunDirectory] = []
    try:
        for run, combination in zip(runs, combinations, strict=True):
            directories.append(api.prepare(run, ["train", *combination]))
        codes = api.launch_all(directories)
    except UserError:
        for directory in directories:
            directory.discard()
        raise
    varied = [[word for word in combination if word not in words] for combination in combinations]
    rows = enumerate(zip(varied, directories, codes, strict=True))
    _print_table([FinishedRun(number, own, str(directory.path), code) for number, (own, directory, code) in rows])
    return next((code for code in codes if code), 0)


def _launch_one(run: Run, command: list[str]) -> int:
    try:
        directory = RunDirectory.create(run, command)
        try:
            return api.launch(directory)
        finally:
            directory.unlock()
    except UserError as error:
        print(f"train: {error}", file=sys.stderr)
        return error.exit_code


def _give_directories(runs: list[Run]) -> None:
    """Give each run a subdirectory of the directory that all share, unless each run has its own directory."""
    paths = {run.job.dir for run in runs}
    if len(paths) == len(runs) and len(runs) > 1:
        return
    first = runs[0].job
    base = Path(first.dir) if first.dir else make_fresh(first.name)
    for number, run in enumerate(runs):
        run.job = replace(run.job, dir=str(base / f"{number:02d}"))


def _print_table(done: list[FinishedRun]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "varied options", "steps", "loss", "validation", "exit code"):
        table.add_column(column, justify="right" if column in ("steps", "loss", "validation", "exit code") else "left")
    for one in done:
        step, loss, validation = _read_last(Path(one.path) / "metrics.jsonl")
        row = (one.path, " ".join(one.words), step, loss, validation, str(one.code))
        table.add_row(*(Text(cell) for cell in row))
    open_console().print(table)


def _read_last(metrics: Path) -> tuple[str, str, str]:
    """Return as text the step and loss of a run's last record, and the run's last validation loss."""
    try:
        records = read_records(metrics, make_notes("train"))
    except OSError:
        return "", "", ""
    if not records:
        return "", "", ""
    held_out = [record["validation_loss"] for record in records if record.get("validation_loss") is not None]
    return (
        str(records[-1]["step"]),
        _format_number(records[-1]["loss"]),
        _format_number(held_out[-1]) if held_out else "",
    )


def _format_number(value: float | str) -> str:
    return f"{float(value):.4f}"
