"""A job of two nodes loses a rank, an agent, a node: with memory and a copy at the other node no step is done twice.

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

from gangline import pulse
from gangline.testing.processes import living
from gangline_ckpt_zarr.tiers import places

SLOW = """
import time
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.callback import Callback
from gangline.parts import CallbackConfig


@dataclass
class Slow(CallbackConfig):
    seconds: float = 1.0


class SlowCallback(Callback):
    def __init__(self, config, run):
        self.seconds = config.seconds

    def before_step(self, *arguments):
        time.sleep(self.seconds)


@hookimpl
def gangline_parts():
    yield Part(name="slow", group="callback", config=Slow, build="slow:SlowCallback", summary="Steps take their time")
"""
WORDS = (
    "parallel=fsdp",
    "run.deterministic=on",
    "precision=fp64",
    "checkpoint.every=null",
    "schedule.warmup_steps=5",
    "callback=[slow]",
)
ELASTIC = ("launch=elastic", "launch.nodes=2", "launch.processes=2")
SECONDS = 240.0


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """With a callback that makes steps last."""
    about = tmp_path / "site" / "gangline_slow-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gangline-slow\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[gangline.v1]\nslow = slow\n")
    (tmp_path / "site" / "slow.py").write_text(SLOW)
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
    """Of metrics.jsonl, each step as often as it was done."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def saved_everywhere(run_dir: Path, beyond: int) -> int:
    """The newest step, as soon as every node has it in memory, where it has just been done and is beyond that one."""
    nodes, before = places.directories(run_dir), lines(run_dir)
    if len(nodes) < 2 or not before or (step := before[-1]["step"]) <= beyond:
        return 0
    whole = all((place / f"step-{step:08d}" / "zarr.json").exists() for place in nodes)
    return step if whole and time.time() - before[-1]["time"] < 0.7 else 0


def lose_rank(session: int, run_dir: Path) -> None:
    os.kill(seen(run_dir)[1], signal.SIGKILL)


def lose_agent(session: int, run_dir: Path) -> None:
    os.kill(processes(session, "gangline.launch.node", "1"), signal.SIGKILL)


def lose_node(session: int, run_dir: Path) -> None:
    """Its agent, its rank, what keeps its memory, and that memory."""
    note = json.loads((run_dir / "logs" / f"sidecar-checkpoint-memory-{os.uname().nodename}-1.json").read_text())
    for pid in (note["pid"], processes(session, "gangline.launch.node", "1"), seen(run_dir)[1]):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(places.of_run(run_dir) / f"{os.uname().nodename}-1")


def processes(session: int, module: str, index: str) -> int:
    """The agent of a node."""
    (pid,) = [
        pid for pid, one in living(session).items() if f"-m {module} " in one.command and f" {index} " in one.command
    ]
    return pid


def seen(run_dir: Path) -> dict[int, int]:
    readings = [pulse.PulseReader(path).read() for path in pulse.find(run_dir)]
    return {one.rank: one.pid for one in readings if one.alive}


@pytest.mark.parametrize(
    ("lose", "copies"),
    [
        pytest.param(lose_rank, 0, marks=pytest.mark.nightly),
        pytest.param(lose_agent, 0),
        pytest.param(lose_node, 1),
    ],
)
def test_no_step_is_lost(runs: Runs, lose: Callable[[int, Path], None], copies: int) -> None:
    out, words = runs.directory / "out", ("run.steps=100000", *WORDS, *ELASTIC, "checkpoint.memory_every=1")
    process = runs.start("run.dir=out", *words, f"checkpoint.memory_copies={copies}")
    step = wait_for(lambda: saved_everywhere(out, 4))
    lose(process.pid, out)
    wait_for(lambda: lines(out)[-1]["step"] >= step + 2)
    again = wait_for(lambda: saved_everywhere(out, step + 2))
    os.kill(process.pid, signal.SIGTERM)
    printed = runs.finish(process, code=75)
    found = lines(out)
    assert [line["step"] for line in found] == [*range(1, len(found) + 1)], printed
    assert {line["generation"] for line in found} == {1, 2}, printed
    assert runs.attempts("out")[-1]["start"] == f"step-{step:08d}", printed
    assert again
    assert not places.of_run(out).exists()
    assert not (out / ".memory").exists()
    words = tuple(word for word in WORDS if word != "callback=[slow]")
    runs.train("run.dir=straight", f"run.steps={len(found)}", *words, "launch.processes=2", "checkpoint=off")
    straight = [(line["step"], line["loss"], line["grad_norm"]) for line in lines(runs.directory / "straight")]
    assert [(line["step"], line["loss"], line["grad_norm"]) for line in found] == straight


def test_without_a_copy_a_lost_node_costs_what_was_not_on_disk(runs: Runs) -> None:
    """It is told, and the run goes on from the disk."""
    out = runs.directory / "out"
    words = ("run.steps=100000", *WORDS, *ELASTIC, "checkpoint.memory_every=1", "checkpoint.every=4")
    process = runs.start("run.dir=out", *words)
    step = wait_for(lambda: saved_everywhere(out, 4))
    lose_node(process.pid, out)
    wait_for(lambda: lines(out)[-1]["generation"] == 2)
    os.kill(process.pid, signal.SIGTERM)
    printed = runs.finish(process, code=75)
    assert runs.attempts("out")[-1]["start"] in ("step-00000004", "step-00000008"), printed
    assert f"checkpoint step-{step:08d} in {places.of_run(out)}" in "\n".join(
        note for line in lines(out) for note in line.get("notes", [])
    )
