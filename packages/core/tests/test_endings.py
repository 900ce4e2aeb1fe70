"""How a job of several agents ends where its ranks, or the agents themselves, could not say so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gangline.ending import RunEnding, read_ending, write_ending
from gangline.launch import failures
from gangline.launch.failures import RankFailure
from gangline.launch.several import Agents
from gangline.launch.starts import Starts

DONE = RunEnding(generation=1, reason="done", exit_code=0, evidence="step 5 is done")


@pytest.mark.parametrize("before", [None, DONE])
def test_agents_that_fail_before_they_meet_are_heard(tmp_path, capfd, before):
    """Here there is no run in the directory; what an earlier job left is no ending of this one."""
    if before is not None:
        write_ending(tmp_path, before)
    assert Agents(tmp_path, 1).watch() == 2
    assert "is no run directory, or was only half-written" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "reason", "requeue"), [(3, "verdict", False), (75, "preempted", True), (1, "bug", True)]
)
def test_ranks_that_ended_say_how_by_their_exit_code(tmp_path, code, reason, requeue):
    """Rank 0 was killed before it wrote the ending."""
    Starts.end(tmp_path, 2, RankFailure(1, "ended", code))
    ending = read_ending(tmp_path)
    assert (ending.reason, ending.requeue, ending.exit_code) == (reason, requeue, code)


@pytest.mark.parametrize(("code", "goes_on"), [(75, True), (3, False)])
def test_under_a_foreign_agent_ranks_that_saved_start_again(tmp_path, code, goes_on):
    (tmp_path / "logs").mkdir()
    failures.claim(tmp_path / "logs", 1, RankFailure(0, "ended", code))
    program = "import sys; from gangline.launch.worker import main; sys.exit(main(sys.argv[1], 'builtins:len'))"
    environment = {**os.environ, "TORCHELASTIC_RESTART_COUNT": "1", "RANK": "0", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, timeout=120)
    assert ended.returncode == (len(str(tmp_path)) % 256 if goes_on else code)
