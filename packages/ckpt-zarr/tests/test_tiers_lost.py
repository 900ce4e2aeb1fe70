"""Two-node job that loses a rank, an agent or a node: with memory copies on the other node no step is repeated.

An agent is a node here; its memory lies in a directory of its own, which goes with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import Runs

from gangline_ckpt_zarr.tiers import places
from gangline_ckpt_zarr.tiers.peers import list_announced
from gangline_testkit.processes import find_living, find_rank_processes

pytestmark = pytest.mark.nightly  # each test runs several nodes for two minutes on a busy machine

HELD = """
import os
import time
from dataclasses import dataclass
from pathlib import Path

from gangline import Part, hookimpl
from gangline.callback import Callback
from gangline.config.schema import CallbackConfig


@dataclass
class Held(CallbackConfig):
    by: str = ""


class HeldCallback(Callback):
    def __init__(self, config, run):
        self.by, self.before = Path(config.by), Path(config.by + "-before")

    def before_step(self, step):
        while self.by.exists():
            written = self.before.with_suffix(f".{os.getpid()}")
            written.write_text(str(step))
            written.replace(self.before)
            time.sleep(0.02)


@hookimpl
def gangline_callbacks():
    yield Part(name="held", config=Held, build="held:HeldCallback", summary="Waits at a file")
"""
WORDS = (
    "parallel=fsdp",
    "run.deterministic=on",
    "precision=fp64",
    "checkpoint.every=null",
    "schedule.warmup_steps=5",
)
# A slow node on a busy machine must not count as lost.
ELASTIC = ("launch=elastic", "launch.nodes=2", "launch.processes=2", "launch.lost_seconds=15")
SECONDS = 240.0


def holding(runs: Runs) -> tuple[str, str]:
    return "callback=[held]", f"callback.held.by={runs.directory / 'hold'}"


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Yield runs with a callback that holds the ranks before a step."""
    about = tmp_path / "site" / "gangline_held-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gangline-held\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[gangline.v1]\nheld = held\n")
    (tmp_path / "site" / "held.py").write_text(HELD)
    with Runs(tmp_path) as found:
        found.environment["PYTHONPATH"] = str(tmp_path / "site")
        yield found


def wait_for(what: Callable[[], object]) -> object:
    deadline = time.monotonic() + SECONDS
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return found


def lines(run_dir: Path) -> list[dict]:
    """Return the records of metrics.jsonl, with repeated steps."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def held(runs: Runs, beyond: int) -> int:
    """Hold all ranks after a step beyond `beyond` that is in the memory of every node; return that step.

    The record of the step may be written already, or may wait for the next poll of rank 0.
    """
    out, hold = runs.directory / "out", runs.directory / "hold"
    wait_for(lambda: (found := lines(out)) and found[-1]["step"] > beyond)
    (runs.directory / "hold-before").unlink(missing_ok=True)
    hold.touch()

    def whole() -> int:
        before, nodes = runs.directory / "hold-before", places.list_node_directories(out)
        # No rank can do the next step without the held rank.
        step = int(before.read_text()) - 1 if before.exists() else 0
        return step if step and len(nodes) == 2 and all(map(saved(step), nodes)) else 0

    return int(wait_for(whole))  # type: ignore[call-overload]


def saved(step: int) -> Callable[[Path], bool]:
    return lambda place: (place / f"step-{step:08d}" / "zarr.json").exists()


def let_go(runs: Runs) -> None:
    (runs.directory / "hold").unlink()


def lose_rank(session: int, run_dir: Path) -> None:
    os.kill(find_rank_processes(run_dir)[1], signal.SIGKILL)


def lose_agent(session: int, run_dir: Path) -> None:
    os.kill(processes(session, "gangline_basics.launch.node", "1"), signal.SIGKILL)


def lose_node(session: int, run_dir: Path) -> None:
    """Kill the agent, the rank and the memory keeper of a node, and delete its memory."""
    note = json.loads((run_dir / "logs" / f"sidecar-checkpoint-memory-{os.uname().nodename}-1.json").read_text())
    for pid in (
        note["sidecar"][0],
        processes(session, "gangline_basics.launch.node", "1"),
        find_rank_processes(run_dir)[1],
    ):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(places.locate_run(run_dir) / f"{os.uname().nodename}-1")


def processes(session: int, module: str, index: str) -> int:
    """Return the process id of the agent of a node."""
    (pid,) = [
        pid
        for pid, one in find_living(session).items()
        if f"-m {module} " in one.command and f" {index} " in one.command
    ]
    return pid


@pytest.mark.parametrize(
    ("lose", "copies"),
    [
        pytest.param(lose_rank, 0, marks=pytest.mark.nightly),
        pytest.param(lose_agent, 0),
        pytest.param(lose_node, 1),
    ],
)
def test_losing_rank_agent_or_node_repeats_no_step(runs: Runs, lose: Callable[[int, Path], None], copies: int) -> None:
    out, words = runs.directory / "out", ("run.steps=100000", *WORDS, *ELASTIC, "checkpoint.memory_every=1")
    process = runs.start("run.dir=out", *words, *holding(runs), f"checkpoint.memory_copies={copies}")
    step = held(runs, 4)
    lose(process.pid, out)
    let_go(runs)
    wait_for(lambda: lines(out)[-1]["step"] >= step + 2)
    again = held(runs, step + 2)
    os.kill(process.pid, signal.SIGTERM)
    let_go(runs)
    printed = runs.finish(process, code=75)
    found = lines(out)
    assert [line["step"] for line in found] == [*range(1, len(found) + 1)], printed
    assert {line["generation"] for line in found} == {1, 2}, printed
    assert runs.read_attempts("out")[-1]["start"] == f"step-{step:08d}", printed
    assert again
    assert not places.locate_run(out).exists()
    assert list_announced(out) == []
    runs.train("run.dir=straight", f"run.steps={len(found)}", *WORDS, "launch.processes=2", "checkpoint=off")
    straight = [(line["step"], line["loss"], line["grad_norm"]) for line in lines(runs.directory / "straight")]
    assert [(line["step"], line["loss"], line["grad_norm"]) for line in found] == straight


def test_lost_node_without_copy_resumes_from_disk(runs: Runs) -> None:
    """Check that the lost checkpoint is reported, and that the run resumes from disk."""
    out = runs.directory / "out"
    words = ("run.steps=100000", *WORDS, *ELASTIC, "checkpoint.memory_every=1", "checkpoint.every=4")
    process = runs.start("run.dir=out", *words, *holding(runs))
    step = held(runs, 4)
    lose_node(process.pid, out)
    let_go(runs)
    wait_for(lambda: lines(out)[-1]["generation"] == 2)
    os.kill(process.pid, signal.SIGTERM)
    printed = runs.finish(process, code=75)
    assert runs.read_attempts("out")[-1]["start"] in ("step-00000004", "step-00000008"), printed
    assert f"checkpoint step-{step:08d} in {places.locate_run(out)}" in "\n".join(
        note for line in lines(out) for note in line.get("notes", [])
    )
