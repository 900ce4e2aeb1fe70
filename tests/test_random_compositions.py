"""Random compositions of parts, options and kills: each is layout-invariant, or refused with a message.

    GANGLINE_DRAWN_SEED=7 GANGLINE_DRAWN_COUNT=100 pytest -m nightly tests/test_random_compositions.py
    GANGLINE_DRAWN_SEED=7 pytest -m nightly tests/test_random_compositions.py -k 7-31  # the same run again

Without a seed, each night draws other compositions; the seed is in the name of every test.
`test_random_run_with_kills_matches_one_process` starts real commands and kills them;
`test_random_layout_sequence_matches_one_process` moves runs between layouts in a pool of ranks.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest
import torch
from random_compositions import BOUND, STEPS, Drawn, drawn

from gangline.config.check import check, count_ranks
from gangline.config.compose import compose_one
from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline.run.directory import RunDirectory
from gangline.train.build import build
from gangline.train.rank import train
from gangline_testkit import RealRuns, rank
from gangline_testkit.pool import get_pool
from gangline_testkit.processes import kill
from gangline_testkit.real_runs import write_small_text

SEED = int(os.environ.get("GANGLINE_DRAWN_SEED") or time.strftime("%Y%m%d"))
COUNT = int(os.environ.get("GANGLINE_DRAWN_COUNT") or 8)  # compositions per night
SECONDS = 600.0  # timeout of one command on a busy machine
REFUSED = 2


class Drawings(RealRuns):
    """Runs of random compositions; `typed` has their commands."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, ("run.name=drawn",), seconds=SECONDS)
        self.typed: list[str] = []

    def carried(self, words: list[str], until: int | None) -> tuple[int, str]:
        """Run `train` and return (exit code, output). until: kill it when this step is recorded; the code is 0."""
        settings = () if any(word.startswith("resume=") for word in words) else self.settings
        self.typed.append(f"train {' '.join((*settings, *words))}" + (f"   # killed at step {until}" if until else ""))
        process = self.start(*words)
        run_dir = next(word.partition("=")[2] for word in words if word.startswith(("run.dir=", "resume=")))
        if until is not None:
            deadline = time.monotonic() + self.seconds
            while process.poll() is None and not self._has_reached(run_dir, until) and time.monotonic() < deadline:
                time.sleep(0.01)
            if process.poll() is None:
                kill(process)
                return 0, process.communicate()[0]
        printed, _ = process.communicate(timeout=self.seconds)
        return process.returncode, printed

    def steps(self, run_dir: str) -> dict[int, dict]:
        """Return step -> its record; the latest record of a repeated step."""
        return {record["step"]: record for record in self.read_records(run_dir)}


def clean(code: int, printed: str) -> None:
    """Check that a command succeeded, or refused its arguments without a traceback."""
    assert code in (0, REFUSED), f"exit code {code}\n{printed}"
    assert "Traceback (most recent call last)" not in printed, printed
    assert code == 0 or "train: " in printed, printed


def compared(found: dict[int, dict], expected: dict[int, dict], bound: float) -> None:
    for step, record in found.items():
        for name in ("loss", "validation_loss"):
            got, want = record.get(name), expected[step].get(name)
            assert (got is None) == (want is None), f"{name} of step {step} is {got!r}, one process has {want!r}"
            if want is not None:
                assert math.isclose(got, want, rel_tol=bound), (
                    f"{name} of step {step}: {got!r}, one process {want!r}: relative {abs(got / want - 1):.1e}"
                )


def held(runs: Drawings, one: Drawn) -> str:
    """Run a composition and compare it with one process; return the outcome as text."""
    alone, carried = ["run.dir=alone", *one.run, "parallel=single", "launch.processes=1"], False
    code, printed = runs.carried(alone, None)
    clean(code, printed)
    if code == REFUSED:
        return "refused alone"
    expected = runs.steps("alone")
    assert list(expected) == list(range(1, STEPS + 1))
    for layout, until in zip(one.layouts, [*one.kills, None], strict=True):
        words = [*layout, "resume=carried"] if carried else ["run.dir=carried", *one.run, *layout]
        code, printed = runs.carried(words, until)
        clean(code, printed)
        carried = carried or (code == 0 and bool(list(runs.directory.glob("carried/metrics.jsonl"))))
    if not carried:
        return "refused"
    if code == REFUSED:  # the last layout was refused; one process can resume any checkpoint
        code, printed = runs.carried(["resume=carried", "parallel=single", "launch.processes=1"], None)
        assert code == 0 or "no checkpoint" in printed or "the run has ended" in printed, printed
    found = runs.steps("carried")
    assert code != 0 or list(found) == list(range(1, STEPS + 1))
    compared(found, expected, BOUND[one.precision])
    return "held"


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(COUNT), ids=lambda number: f"{SEED}-{number}")
def test_random_run_with_kills_matches_one_process(number, tmp_path, record_property):
    with Drawings(tmp_path) as runs:
        try:
            came = held(runs, drawn(SEED, number))
        except Exception as error:
            raise AssertionError("\n".join(["", *runs.typed, str(error)])) from error
    record_property("came", came)
    print(f"drawn {SEED}-{number}: {came}; " + " ; ".join(runs.typed))


def on_a_rank(words: list[str]) -> None:
    torch.manual_seed(time.monotonic_ns())  # results must not depend on this seed
    run = compose_one(words)
    mesh = Mesh.of(run.parallel.size_axes(rank.world))
    train(build(run, RunDirectory.open(str(run.job.dir)), mesh, rank.make_comms(mesh), torch.device("cpu")))


def went(place: Path, name: str, one: Drawn, layout: list[str], steps: int) -> str | None:
    """Start or resume a run up to a step; return the error if it is refused, else None."""
    here = (f"data.path={place / 'corpus'}", f"run.dir={place / name}", f"run.steps={steps}")
    words = [*one.run, *layout, *here, "schedule=constant", "schedule.warmup_steps=2"]
    try:
        run = compose_one(words)
        check(run)
        if not (place / name).exists():
            RunDirectory.create(run).unlock()
        get_pool(count_ranks(run)).run(on_a_rank, words, timeout=SECONDS)
    except UserError as error:
        return str(error)
    return None


def records(directory: Path) -> dict[int, dict]:
    return {record["step"]: record for record in map(json.loads, (directory / "metrics.jsonl").open())}


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(2 * COUNT), ids=lambda number: f"{SEED}-{number}")
def test_random_layout_sequence_matches_one_process(number, tmp_path):
    write_small_text(tmp_path / "corpus")
    one, seen = drawn(SEED, number), 0
    refused = went(tmp_path, "alone", one, ["parallel=single", "launch.processes=1"], STEPS)
    came = ["alone" if refused is None else f"alone refused: {refused}"]
    for layout, steps in zip(one.layouts, [*one.kills, STEPS], strict=True) if refused is None else ():
        refused = went(tmp_path, "carried", one, layout, steps)
        came.append(f"{' '.join(layout)} to step {steps}: {refused or 'went'}")
        seen = seen if refused else steps
    print(f"drawn {SEED}-{number}: {' '.join(one.run)}", *came, sep="\n  ")
    if seen:
        found, expected = records(tmp_path / "carried"), records(tmp_path / "alone")
        assert list(found) == list(range(1, seen + 1)), came
        compared(found, expected, BOUND[one.precision])


def test_random_runs_are_reproducible():
    assert drawn(3, 5) == drawn(3, 5) != drawn(3, 6)
    every = [drawn(0, number) for number in range(200)]
    words = {word for one in every for word in (*one.run, *(word for layout in one.layouts for word in layout))}
    assert {f"precision={name}" for name in BOUND} <= words
    assert {"moe=on", "optimizer=muon", "checkpoint=torch", "checkpoint=zarr", "parallel=3d", "parallel.cp=2"} <= words
    assert all(len(one.kills) == len(one.layouts) - 1 for one in every)
