"""Parsing of scontrol output and mount tables, rank order, and requeue decisions. No Slurm is needed."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from gangline import UserError
from gangline.config import ParallelConfig
from gangline.config.defaults import build_default_run
from gangline.run.ending import RunEnding, decide_ending
from gangline_basics.cluster.given import count_nodes_per_rack
from gangline_basics.launch.placed import PlacedAddress
from gangline_launch import agent, clocks, fabric, storage
from gangline_launch.explain import describe_axes_by_tier
from gangline_launch.kubernetes import levels
from gangline_launch.kubernetes.manifests import FINAL_CODES, SAVED_CODES
from gangline_launch.nodes import find_own_node, read_addresses
from gangline_launch.slurm.after import decide
from gangline_launch.slurm.commands import parse_fields, parse_gpu_count
from gangline_launch.slurm.config import SlurmLaunch
from gangline_launch.slurm.requeues import BEGIN, JobRequeue
from gangline_launch.slurm.scheduler import parse_state
from gangline_launch.state import ENDED, RUNS, WAITS

LINE = (
    "JobId=7 JobName=gangline-run UserId=root(0) Priority=4294901757 JobState=PENDING Reason=Resources "
    "Requeue=1 Restarts=2 BatchFlag=1 ExitCode=0:0 NodeList=(null) NumNodes=5 TRES=cpu=10,node=5 "
    "Command=/shared/runs/with space/launch/job.sh Power="
)


def test_scontrol_line_is_parsed_by_keys():
    found = parse_fields(LINE)
    assert found["JobState"] == "PENDING"
    assert found["TRES"] == "cpu=10,node=5"
    assert found["Command"] == "/shared/runs/with space/launch/job.sh"
    assert found["Power"] == ""


def test_job_state_inside_path_is_ignored():
    assert parse_fields(LINE.replace("with space", "x JobState=FAILED y"))["JobState"] == "PENDING"


@pytest.mark.parametrize(
    ("said", "phase", "line", "hopeless"),
    [
        ({}, WAITS, "pending (Resources: waiting for free nodes), restarted 2 times", False),
        ({"Reason": "PartitionNodeLimit"}, WAITS, "pending (PartitionNodeLimit), restarted 2 times", True),
        ({"Reason": "ReqNodeNotAvail, UnavailableNodes:n2"}, WAITS, "", False),
        ({"JobState": "RUNNING", "NodeList": "n[1-5]", "Restarts": "0"}, RUNS, "running on n[1-5] ", False),
        ({"JobState": "FAILED", "ExitCode": "75:0", "Reason": "NonZeroExitCode", "Restarts": "0"}, ENDED, "", False),
        (
            {"Reason": "launch_failed_requeued_held", "Restarts": "0"},
            WAITS,
            "pending (launch_failed_requeued_held: the job is held; to release the job: scontrol release 7)",
            False,
        ),
        (
            {"Reason": "JobHeldUser", "Restarts": "0", "ArrayJobId": "6", "ArrayTaskId": "2"},
            WAITS,
            "pending (JobHeldUser: the job is held; to release the job: scontrol release 6_2)",
            False,
        ),
        (
            {"Reason": "JobHeldAdmin", "Restarts": "0"},
            WAITS,
            "pending (JobHeldAdmin: an administrator holds the job)",
            False,
        ),
        ({"JobState": "CANCELLED", "Restarts": "1"}, ENDED, "cancelled (Resources), restarted", False),
    ],
)
def test_job_state_is_parsed_and_described(said, phase, line, hopeless):
    state = parse_state({**parse_fields(LINE), **said})
    assert state.phase == phase
    assert bool(state.hopeless) == hopeless
    assert state.describe().startswith(line.strip())


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("(null)", 0),
        ("gpu:8", 8),
        ("gpu:h100:8(S:0-1)", 8),
        ("nvme:1,gpu:a100:4,gpu:v100:2", 6),
        ("gpu:3g.20gb:2", 2),
        ("gpu:h100:4(S:0,1),gpu", 5),
        ("gres/gpu:2", 2),
    ],
)
def test_gpus_are_counted_from_gres(gres, count):
    assert parse_gpu_count(gres) == count


# --- storage ---

MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
/dev/nvme0 /home/local xfs rw 0 0
scratch /lustre lustre rw 0 0
"""


def test_paths_on_local_mounts_are_reported(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    needed = [(path, path) for path in ("/home/me/run", "/home/local/run", "/lustre/run", "/var/run1", "/dev/shm/run")]
    said = [problem.what for problem in storage.find_local_paths(needed, [], mounts)]
    assert [text.split(",")[0].split(" is ")[1] for text in said] == ["/home/local/run", "/var/run1", "/dev/shm/run"]
    assert [
        problem.what for problem in storage.find_local_paths(needed, ["/", "/home/local", "/dev/shm"], mounts)
    ] == []


def test_needed_paths_include_run_dir_data_and_code(tmp_path):
    run = build_default_run()
    run.data.path = "corpus"
    names = [what for what, _ in storage.list_needed_paths(run, tmp_path)]
    assert names[0] == "the run directory"
    assert "data.path" in names
    assert names[-1] == "the Python environment"
    (last, where) = list(storage.list_needed_paths(run, tmp_path, code=False))[-1]
    assert "outside the image" in last  # the last line of the script uses the login node's Python
    assert where == sys.prefix


# --- network ---


def test_ranks_are_sorted_by_topology_place():
    """Sort as torch sorts the members of a rendezvous: by address, then by process."""
    places = [f"spine.rack{rack}.n{node}" for rack in (0, 1, 9, 10) for node in (1, 2, 10, 100)]
    nodes = [(PlacedAddress("10.0.0.1", place), number, 0) for number, place in enumerate(places)]
    shuffled = random.Random(0).sample(nodes, len(nodes))
    assert [address.place for address, *_ in sorted(shuffled)] == places
    kept = pickle.loads(pickle.dumps(nodes[3][0]))
    assert kept == nodes[3][0]
    assert kept.place == places[3]
    assert kept != nodes[2][0]
    assert nodes[2][0] <= kept
    assert f"{kept}" == "10.0.0.1"


def test_uneven_racks_default_to_one_node_per_rack():
    assert count_nodes_per_rack(["s.r0.a", "s.r0.b", "s.r1.c", "s.r1.d"]) == 2
    assert count_nodes_per_rack(["s.r0.a", "s.r0.b", "s.r1.c"]) == 1


def test_pods_are_sorted_by_node_labels(tmp_path, capsys):
    wanted = ["topology.kubernetes.io/zone", "rack"]
    labels = {
        f"ip-{number}.internal": {"topology.kubernetes.io/zone": f"z{number // 4}", "rack": f"r{number // 2 % 2}"}
        for number in range(8)
    }
    places = {name: levels.make_place(name, of_node, wanted) for name, of_node in labels.items()}
    assert places["ip-5.internal"] == "z1.r0.ip-5-internal"
    assert count_nodes_per_rack(list(places.values())) == 2
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / levels.FILE).write_text(json.dumps(places))
    given = []
    for index, name in enumerate(random.Random(1).sample(sorted(places), 8)):
        of_pod = {"GANGLINE_POD": f"10.0.0.{index}", "GANGLINE_KUBERNETES_NODE": name, "GANGLINE_PLACE": str(index)}
        given.append(find_own_node(tmp_path, of_pod))
    inside = [PlacedAddress(node.address, node.place) for node in given]
    assert [address.place for address in sorted(inside)] == list(places.values())
    unknown = find_own_node(tmp_path, {**of_pod, "GANGLINE_KUBERNETES_NODE": "new.internal"})
    placed = PlacedAddress(unknown.address, unknown.place)  # a node that joined after the submit
    assert max([*inside, placed]) is placed
    assert "node new.internal is newer than the submit" in capsys.readouterr().err


def test_node_clocks_that_differ_are_refused(tmp_path, monkeypatch):
    real = time.time
    monkeypatch.setattr(clocks, "AGAIN_SECONDS", 0.0)
    clocks.compare(tmp_path, "n1", 4.0)
    clocks.compare(tmp_path, "n2", 4.0)
    monkeypatch.setattr("time.time", lambda: real() + 60.0)
    with pytest.raises(UserError, match="clocks of n3 and n1 differ by 60 s"):
        clocks.compare(tmp_path, "n3", 4.0)
    for name in ("n1", "n2"):  # clock files of yesterday's job
        os.utime(tmp_path / "launch" / "clocks" / name, (real() - 86400, real() - 86400))
    clocks.compare(tmp_path, "n3", 4.0)


def test_clocks_of_an_earlier_job_are_forgotten(tmp_path, monkeypatch):
    real = time.time
    monkeypatch.setattr(clocks, "AGAIN_SECONDS", 0.0)
    (tmp_path / "launch").mkdir()
    clocks.forget(tmp_path)
    monkeypatch.setattr("time.time", lambda: real() + 60.0)
    clocks.compare(tmp_path, "bad", 4.0)
    monkeypatch.setattr("time.time", real)
    clocks.forget(tmp_path)
    clocks.compare(tmp_path, "good", 4.0)


def test_clock_rewritten_during_read_is_consistent(tmp_path, monkeypatch):
    """Rewrite the clock file during the read: text and time must come from one open file."""
    clocks.compare(tmp_path, "n1", 4.0)
    path = tmp_path / "launch" / "clocks" / "n1"
    fstat = os.fstat

    def meanwhile(handle):
        found = fstat(handle)
        monkeypatch.setattr("os.fstat", fstat)
        clocks._note(path, 1.0)
        os.utime(path, (time.time() + 60, time.time() + 60))
        return found

    monkeypatch.setattr("os.fstat", meanwhile)
    ahead, _ = clocks._read(path)
    assert abs(ahead) < 4.0


def test_clock_difference_is_confirmed_by_second_check(tmp_path, monkeypatch):
    monkeypatch.setattr(clocks, "AGAIN_SECONDS", 0.0)
    clocks.compare(tmp_path, "n1", 4.0)
    looks = []
    differs = clocks._find_clock_difference
    monkeypatch.setattr(
        clocks, "_find_clock_difference", lambda *a: differs(*a) if looks else looks.append(1) or ("n1", 60.0)
    )
    clocks.compare(tmp_path, "n2", 4.0)


@pytest.mark.parametrize("folder", ["t" * 100, "missing"])
def test_temporary_folder_without_socket_support_is_refused(tmp_path, folder):
    """Use a folder whose path is too long for a Unix socket, and a folder that does not exist."""
    agent.refuse_temporary_folder()
    code = "import tempfile, sys; tempfile.tempdir = sys.argv[1]; from gangline_launch import agent\n"
    code += "try: agent.refuse_temporary_folder()\nexcept Exception as error: print(type(error).__name__, error)"
    (tmp_path / ("t" * 100)).mkdir()
    asked = [sys.executable, "-c", code, str(tmp_path / folder)]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert "UserError" in said
    assert "cannot create a Unix socket" in said
    assert "TMPDIR=/tmp" in said


def test_node_addresses_are_read_from_slurm(tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "nodes").write_text("NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=n1\n")
    assert read_addresses(tmp_path) == {"n1": "10.0.0.7"}


EXPLAINED = """\
4 nodes, 8 ranks
  spine.rack0.n1: ranks 0 to 1
  spine.rack0.n2: ranks 2 to 3
  spine.rack1.n3: ranks 4 to 5
  spine.rack1.n4: ranks 6 to 7
  dp_replicate 2: ranks communicate over the cluster
  dp_shard 4: ranks communicate over the rack"""


UNEVEN = EXPLAINED.replace("rack0.n2", "rack1.n2").replace("the rack", "the cluster")  # dp_shard spans both racks
SPARE = "  spine.rack1.n5: spare, without ranks\n  dp_replicate"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (["rack0", "rack0", "rack1", "rack1"], EXPLAINED),
        (["rack0"] * 4, EXPLAINED.replace("rack1", "rack0").replace("the cluster", "the rack")),
        (["rack0", "rack1", "rack1", "rack1"], UNEVEN),
        (["rack0", "rack0", "rack1", "rack1", "rack1"], f"5{EXPLAINED[1:]}".replace("  dp_replicate", SPARE)),
    ],
)
def test_explain_shows_network_tier_of_each_axis(tmp_path, where, expected):
    run = build_default_run(parallel="ddp", launch=SlurmLaunch())
    run.parallel = Halves()
    names = [f"n{number}" for number, _ in enumerate(where, 1)]
    places = [f"spine.{rack}.{name}" for name, rack in zip(names, where, strict=True)]
    launch = {"event": "launch", "nodes": names, "places": places, "processes": 8, "spares": 2 * len(names) - 8}
    (tmp_path / "events.jsonl").write_text(json.dumps(launch) + "\n")
    assert "\n".join(describe_axes_by_tier(run, tmp_path)) == expected


@dataclass
class Halves(ParallelConfig):
    """Parallel strategy that shards within groups of four ranks."""

    def size_axes(self, world):
        return {"dp_replicate": world // 4, "dp_shard": 4}


@pytest.mark.parametrize("name", fabric.FABRICS)
def test_fabric_lines_have_source_and_reason(name):
    for line in fabric.FABRICS[name]:
        assert line.source.startswith("https://")
        assert line.why
    run = build_default_run(parallel="ddp", launch=SlurmLaunch(fabric=name, processes=1))
    assert run.launch.get_environment(run) == fabric.get_variables(name)


# --- requeue decisions ---


def ending(reason: str, code: int, requeue: bool) -> RunEnding:
    return RunEnding(generation=1, reason=reason, exit_code=code, requeue=requeue)


@pytest.mark.parametrize(
    ("how", "code", "new", "then"),
    [
        (ending("done", 0, False), 0, (), "end"),
        (ending("mistake", 2, False), 2, (), "end"),
        (ending("verdict", 3, False), 3, ("n1",), "end"),
        (ending("preempted", 75, True), 75, (), "requeue"),
        (ending("restart", 75, True), 75, ("n1",), "submit"),
        (None, 137, (), "requeue"),
        (None, 0, (), "end"),
    ],
)
def test_job_ending_decides_requeue_submit_or_end(how, code, new, then):
    assert decide(how, code, 10, [], 3, new)[0] == then


def test_futile_starts_end_the_job():
    bug = ending("bug", 1, True)
    before: list[JobRequeue] = []
    thens = []
    for step in (4, 9, 9, 9, 9):
        then, why = decide(bug, 1, step, before, 3, ())
        thens.append(then)
        before.append(JobRequeue(0.0, "7", step, 1, why, then))
    assert thens == ["requeue"] * 4 + ["end"]
    assert why == "3 starts without progress past step 9 (launch.futile_requeues)"
    assert decide(bug, 1, 1, [], 0, ())[0] == "requeue"  # the start has made a step, so it is not futile


def test_fresh_run_ends_after_futile_starts():
    lines = [JobRequeue(0.0, "7", 0, 1, "bug", "requeue")] * 2
    assert [decide(None, 1, 0, lines[:count], 3, ())[0] for count in range(3)] == ["requeue", "requeue", "end"]


def test_resumed_run_ends_after_futile_starts():
    lines = [JobRequeue(0.0, "7", 9, 0, "submitted", BEGIN), *[JobRequeue(0.0, "7", 9, 1, "bug", "requeue")] * 2]
    assert [decide(None, 1, 9, lines[:count], 3, ())[0] for count in (1, 2, 3)] == ["requeue", "requeue", "end"]


@pytest.mark.parametrize(("code", "why"), [(2, "mistake"), (3, "verdict")])
def test_final_exit_code_without_ending_json_ends_job(code, why):
    assert decide(None, code, 4, [], 3, ()) == ("end", why)


def test_final_jobset_exit_codes_are_never_requeued():
    """Compare with the exit codes, because Kubernetes sees only those; Slurm's script also reads ending.json."""
    assert not any(decide_ending(0, exit_code=code).requeue for code in FINAL_CODES)
    assert all(decide_ending(0, exit_code=code).requeue for code in (1, *SAVED_CODES))
