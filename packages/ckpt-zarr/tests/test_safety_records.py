"""`checkpoint.memory_every=1`: a step that the run has reported is never repeated after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Runs

from gangline.pulse import layout
from gangline.pulse.memory import list_pulses
from gangline.run.events import read_events
from gangline_testkit.processes import find_children, find_rank_processes


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with Runs(tmp_path) as found:
        yield found


def wait_until_it_stands(metrics: Path, seconds: float = 2.0) -> None:
    """Return once the file has not grown for `seconds`; if the run continues later, the test is only weaker."""
    size, since, end = -1, time.monotonic(), time.monotonic() + 120
    while time.monotonic() - since < seconds and time.monotonic() < end:
        now = metrics.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
        time.sleep(0.02)


def beats(run_dir: Path) -> dict[int, tuple[int, int]]:
    """Return (heartbeat, phase number) of each rank."""
    heads = [memoryview(path.read_bytes()).cast("q")[: layout.HEAD].tolist() for path in list_pulses(run_dir)]
    return {head[layout.RANK]: (head[layout.BEAT], head[layout.PHASE]) for head in heads}


def test_reported_step_is_not_repeated_after_kill(runs: Runs) -> None:
    """Kill a rank while its save hangs: every step reported before must be complete in memory."""
    words = ("run.steps=100000", "checkpoint.every=null", "parallel=ddp", "launch.processes=2")
    process = runs.fork("run.dir=out", *words, "checkpoint.memory_every=1", "launch.max_restarts=1")
    runs.wait_for_step(process, "out", 5)
    victim = find_rank_processes(runs.directory / "out")[1]
    (writer,) = [pid for pid, command in find_children(victim).items() if "save.writer.process" in command]
    os.kill(writer, signal.SIGSTOP)
    out = runs.directory / "out"
    wait_until_it_stands(out / "metrics.jsonl")
    before = beats(out)
    time.sleep(0.5)
    assert beats(out) == before, "to those who watch, ranks that wait for a save stand still"
    os.kill(victim, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(writer, signal.SIGKILL)
    _, last = runs.end(process, "out", 5)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, last + 1)]
    assert {line["generation"] for line in lines} == {1, 2}


def test_lost_node_is_detected_while_save_waits(runs: Runs) -> None:
    """Kill an agent between two steps, when no collective detects it; no other agent can take its place."""
    out = runs.directory / "out"
    words = ("run.steps=60", "checkpoint.every=20", "parallel=ddp", "launch.processes=2", "checkpoint.memory_every=1")
    words += ("launch=elastic", "launch.nodes=1:2", "launch.agents=1")
    agents = {node: runs.fork("run.dir=out", *words, GANGLINE_NODE=node) for node in ("127.0.0.1", "127.0.0.2")}
    runs.wait_for_step(agents["127.0.0.1"], "out", 5)
    nodes = next(event["nodes"] for event in read_events(out) if event["event"] == "start")
    first, lost = (agents[node] for node in nodes)
    (writer,) = [
        pid for pid, command in find_children(find_rank_processes(out)[1]).items() if "save.writer.process" in command
    ]
    os.kill(writer, signal.SIGSTOP)
    try:
        wait_until_it_stands(out / "metrics.jsonl")
        os.kill(lost.pid, signal.SIGKILL)
        runs.finish(first)
    finally:
        os.kill(writer, signal.SIGCONT)  # the writer finds its trainer gone and exits
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 61)]
    assert {line["generation"] for line in lines} == {1, 2}
