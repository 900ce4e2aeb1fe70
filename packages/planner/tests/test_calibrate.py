"""`gangline plan calibrate`: measurements of a machine as a cluster file for plans."""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
from pathlib import Path

import pytest

from gangline.cli.main import main
from gangline.explain.explained import StepAction
from gangline.model.matmuls import AttentionMatmuls, Matmul
from gangline_basics.cluster.file import Quantity, load_cluster, save_cluster
from gangline_basics.explain.timeline import StepTimeline
from gangline_planner.assumed import complete_words, explain
from gangline_planner.calibrate.command import build_cluster, count_threads, describe_crowding, read_error, run_ranks
from gangline_planner.calibrate.fit import Measured, compute_stage_time, count_work, fit_numbers
from gangline_planner.calibrate.kernels import ATTENTION, MATMULS
from gangline_planner.calibrate.lines import fit_two_costs
from gangline_planner.calibrate.links import CollectiveCall
from gangline_planner.calibrate.small_steps import MICROBATCHES, MODELS, STARTS
from gangline_planner.price.matmuls import BACKWARD
from gangline_planner.price.sharing import Cores, share_cores
from gangline_planner.price.step import compute_step_time


def test_fit_recovers_two_non_negative_costs():
    points = [(a, b, t := 3e-5 * a + 2e-9 * b, t) for a, b in ((1.0, 1e3), (2.0, 1e5), (1.0, 1e7))]
    assert fit_two_costs(points) == pytest.approx((3e-5, 2e-9))
    assert fit_two_costs([(1.0, 1.0, 2.0, 1.0), (1.0, 4.0, 1.0, 1.0)]) == (1.5, 0.0)  # time falls with b: b costs 0
    assert fit_two_costs([(0.0, 1.0, 2.0, 2.0), (0.0, 4.0, 8.0, 8.0)]) == (0.0, pytest.approx(2.0))
    assert fit_two_costs([(1.0, 1.0, -1.0, 1.0), (1.0, 4.0, -2.0, 1.0)]) == (0.0, 0.0)


def machine(**other: float) -> dict[str, float]:
    """Return the numbers of a made-up machine."""
    known = {
        "peak.fp32": 5e10, "peak.bf16": 1e11, "matmul.half": 2e6, "memory.bandwidth": 2e10, "elementwise.passes": 3.0,
        "attention.efficiency": 0.5, "attention.efficiency_backward": 0.4, "attention.half": 100.0,
        "module.seconds": 1e-7,
    }  # fmt: skip
    return {**known, "elementwise.passes_apart": 3.0, **other}


def measurements(known: dict[str, float], ranks: int = 1) -> Measured:
    """Return the measurements that a machine with these numbers would give."""
    matmuls = {}
    for name, itemsize in (("fp32", 4), ("bf16", 2)):
        matmuls[name] = {
            (shape := Matmul(rows=rows, inner=inner, columns=columns)): (shape.flops + known["matmul.half"])
            / known[f"peak.{name}"]
            + (rows * (inner + columns) + inner * columns) * itemsize / known["memory.bandwidth"]
            for rows, inner, columns in MATMULS["cpu"]
        }
    forward, backward = {}, {}
    for sequences, tokens, heads, width in ATTENTION["cpu"]:
        shape = AttentionMatmuls(
            sequences=sequences, queries=tokens, keys=tokens, heads=heads, kv_heads=heads, head_dim=width
        )
        flops = shape.flops * shape.visible * (1 + known["attention.half"] / tokens) / known["peak.fp32"]
        forward[shape] = flops / known["attention.efficiency"]
        backward[shape] = BACKWARD * flops / known["attention.efficiency_backward"]
    return Measured(
        copied=known["memory.bandwidth"],
        matmuls=matmuls,
        forward=forward,
        backward=backward,
        steps={model: MICROBATCHES * compute_stage_time(model, "cpu", known).all for model in MODELS["cpu"]},
        starts=MICROBATCHES * 3 * count_work(STARTS, "cpu").modules * known["module.seconds"],
        update=1e-3,
        sent={
            CollectiveCall(name, n, size): CollectiveCall(name, n, size).rounds * 1e-5 + size / 1e9
            for n in {2, ranks} - {1}
            for name in ("all_reduce", "all_gather")
            for size in (4e3, 4e5, 4e7)
        },
        hidden=0.25,
        late=0.06,
        alone=2.0,
    )


def test_fit_recovers_numbers_of_known_machine():
    known = machine()
    found = fit_numbers(measurements(known, ranks=4), 4, "cpu")
    for name, value in known.items():
        assert found[name] == pytest.approx(value, rel=1e-3), name
    assert found["link.node.bandwidth"] == pytest.approx(1e9)
    assert found["link.node.latency"] == pytest.approx(1e-5)
    assert found["jitter.sigma"] * math.sqrt(2 * math.log(4)) == pytest.approx(0.06)
    assert (found["overlap.share"], found["node.alone"], found["host.seconds"]) == (0.25, 2.0, 1e-3)


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(12, 50))]
)
def test_noisy_measurements_give_valid_cluster_file(tmp_path, seed):
    """Multiply each measurement by its own random factor of up to a hundred."""
    draw = random.Random(seed)

    def disturbed(seconds):
        return {key: value * 10 ** draw.uniform(0, 2) for key, value in seconds.items()}

    measured = measurements(machine(), ranks=4)
    measured.matmuls = {name: disturbed(seconds) for name, seconds in measured.matmuls.items()}
    for name in ("forward", "backward", "steps", "sent"):
        setattr(measured, name, disturbed(getattr(measured, name)))
    measured.copied /= 10 ** draw.uniform(0, 2)
    measured.alone, measured.late = draw.uniform(0.1, 5), draw.uniform(-0.5, 3)
    path = tmp_path / "here.yaml"
    save_cluster(build_cluster(path, fit_numbers(measured, 4, "cpu") | {"memory.bytes": 1e9}, 4, "made up"), path)
    cluster = load_cluster(str(path))
    words = [
        "parallel=ddp",
        "launch.processes=4",
        "batch.global_size=16",
        "batch.sequence_length=128",
        "run.device=cpu",
    ]
    case = complete_words(words)
    step = compute_step_time(explain(case, case.run, cluster), cluster)
    assert 0 < step.seconds < 1e4
    assert min(step.kinds.values()) >= 0


ACTION = StepAction("F", 0, 0)
# two pipeline ranks in three units of time: only the first is busy, then both, then only the second
TIMELINE = StepTimeline((((ACTION, 0.0, 2.0),), ((ACTION, 1.0, 3.0),)))


@pytest.mark.parametrize(
    ("alone", "node", "each", "part", "makespan"),
    [
        (1.0, 2, 1, 1.0, 3.0),
        (0.5, 2, 1, 1.0, 3.0),  # more cores never make a rank slower
        (1.5, 2, 1, 1.0, 1 / 1.5 + 1 + 1 / 1.5),
        (8.0, 2, 1, 1.0, 2.0),  # one of two ranks has at most twice its own speed
        (8.0, 4, 1, 1.0, 1 / 4 + 1 / 2 + 1 / 4),  # a node for four ranks, of which two run
        (8.0, 8, 4, 1.0, 2.0),
        (8.0, 4, 4, 1.0, 3.0),  # each stage fills a node: a waiting stage frees no cores for others
        (8.0, 4, 8, 1.0, 3.0),
        (8.0, 2, 1, 0.5, 2.5),  # half of each action is a transfer, which more cores do not speed up
        (8.0, 2, 1, 0.0, 3.0),
    ],
)
def test_waiting_ranks_yield_cores_to_running_ranks(alone, node, each, part, makespan):
    cores = Cores(max(1.0, alone), node, each, pipeline=2)
    found = share_cores(TIMELINE, cores, lambda action: part)
    assert found.makespan == pytest.approx(makespan)
    assert TIMELINE.makespan / cores.most <= found.makespan + 1e-9


def test_node_without_idle_cores_limits_rank_speed():
    """Place three pipeline ranks of two ranks each on nodes of four; the third has a node to itself."""
    cores = Cores(8.0, 4, 2, pipeline=3)
    assert cores.compute_speeds([0, 1, 2]) == {0: 1.0, 1: 1.0, 2: 2.0}
    assert cores.compute_speeds([0, 2]) == {0: 2.0, 2: 2.0}
    assert Cores(8.0, 4, 3, pipeline=2).compute_speeds([0, 1]) == {0: 1.0, 1: 1.0}  # the second spans both nodes


def test_idle_cores_do_not_shorten_transfers():
    timeline = StepTimeline((((ACTION, 0.0, 1.0),), ((ACTION, 1.5, 2.5),)))
    assert share_cores(timeline, Cores(2.0, 2, 1, 2), lambda action: 1.0, hop=0.5).makespan == pytest.approx(1.5)
    both = StepTimeline((((ACTION, 0.0, 2.0),), ((ACTION, 1.5, 2.5),)))  # the transfer overlaps with compute
    assert share_cores(both, Cores(2.0, 2, 1, 2), lambda action: 1.0, hop=0.5).makespan == pytest.approx(1.75)


def test_run_with_fewer_ranks_gains_idle_cores():
    numbers = {"node.alone": Quantity(3.0, "a test")}
    eight = load_cluster("h100_ib").replace_numbers(numbers)  # eight ranks per node
    words = "parallel=ddp batch.micro_size=1 launch.processes="
    seconds = {}
    for processes in (1, 4, 8, 16):
        case = complete_words([*f"{words}{processes}".split(), f"batch.global_size={processes}"])
        step = compute_step_time(explain(case, case.run, eight), eight)
        assert sum(step.kinds.values()) == pytest.approx(step.seconds)
        seconds[processes] = step.kinds["compute"]
    assert seconds[1] == pytest.approx(seconds[8] / 3)
    assert seconds[4] == pytest.approx(seconds[8] / 2)
    assert seconds[16] == pytest.approx(seconds[8])


def test_progress_is_printed_and_other_output_logged(tmp_path, capsys):
    script = (
        "print('noise'); from gangline_planner.calibrate.progress import RoundProgress as P; P('round 2 of 3', True)"
    )
    words = [sys.executable, "-c", f"{script}('copies', 0); P('round 2 of 3', False)('copies', 0); raise SystemExit(7)"]
    assert run_ranks(words, dict(os.environ), tmp_path / "log") == 7
    assert re.fullmatch(r"calibrate: round 2 of 3, copies: \d\.\d s\n", capsys.readouterr().err)
    assert (tmp_path / "log").read_text() == "noise\n"


@pytest.mark.waits
def test_calibrate_writes_file_usable_by_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "calibrate", "--out", "here.yaml", "--processes", "2", "--rounds", "1"]) == 0
    found = load_cluster(str(tmp_path / "here.yaml"))
    assert found.topology.gpus_per_node == 2
    assert found["peak.fp32"] > 1e8
    assert found["link.node.bandwidth"] > 1e6
    assert "measured by gangline plan calibrate" in found.numbers["memory.bandwidth"].source
    assert found["node.alone"] >= 1
    assert "measured by" in found.numbers["overlap.share"].source
    printed = capsys.readouterr()
    assert "calibrate:" not in printed.out
    assert all(re.fullmatch(r"calibrate: round 1 of 1, .+: \d+\.\d s", line) for line in printed.err.splitlines())
    assert len(printed.err.splitlines()) > 10
    words = "parallel=ddp launch.processes=2 batch.global_size=16 cluster=here.yaml --json"
    assert main(["plan", *words.split()]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--processes 2", "gangline plan: calibrate needs the name of a .yaml file to write."),
        ("--out here.txt", "gangline plan: calibrate needs the name of a .yaml file to write."),
        ("--out here.yaml --processes 1.5", "--processes 1.5: expected an integer."),
        ("--out here.yaml --rounds 0", "--rounds 0: expected a number above 0."),
        ("--out nowhere/here.yaml", "nowhere is not a directory."),
        ("--out there.yaml", "there.yaml exists already."),
    ],
)
def test_invalid_calibrate_arguments_are_refused(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").touch()
    assert main(["plan", "calibrate", *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_ranks_use_thread_count_of_a_run(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert count_threads(2) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    assert (count_threads(1), count_threads(2), count_threads(cores * 4)) == (cores, max(1, cores // 2), 1)


def test_more_processes_than_cores_are_reported():
    cores = len(os.sched_getaffinity(0))
    assert describe_crowding(cores) == []
    (line,) = describe_crowding(cores + 1)
    assert line.startswith(f"{cores + 1} processes share {cores} cores: ")


def test_first_rank_error_is_reported_without_torchrun_summary(tmp_path):
    log = tmp_path / "log"
    log.write_text("Traceback:\n[rank1]: ValueError: the mesh has 2 ranks\nChildFailedError:\n=====\n")
    assert read_error(log) == ["[rank1]: ValueError: the mesh has 2 ranks"]
    Path(log).write_text("")
    assert read_error(log) == ["The processes printed no error."]
