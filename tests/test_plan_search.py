"""`gangline plan search`: every row passes `check`, is in order, and equals the plan of its overrides."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from gangline import UserError
from gangline.cli.main import main
from gangline.config.compose import compose_one
from gangline_basics.cluster.file import Quantity, load_cluster, save_cluster
from gangline_planner.assumed import check_run, choose_strategy, complete_words, explain
from gangline_planner.bounds import iterate_by_bound, sort_by_bound
from gangline_planner.choose import NEAR, choose_plan, plan_alternative
from gangline_planner.forecast import forecast
from gangline_planner.price.step import Pieces
from gangline_planner.search import search

MODEL = "model.layers=8 model.heads=8 model.kv_heads=8"
SIZES = "batch.global_size=16 batch.sequence_length=128 precision=fp32"
WORDS = f"parallel=3d launch.processes=8 {SIZES} {MODEL}"


@pytest.mark.parametrize(
    ("words", "cluster"),
    [
        (f"{WORDS} parallel.cp=1 parallel.tp=2 run.recompute=none", "h100_ib"),
        (f"{WORDS} parallel.pp=4 batch.micro_size=1", "a100_800g"),
        (f"{WORDS} parallel.pp=1 parallel.zero=1 moe=on moe.experts=4 batch.micro_size=1", "b200_ib"),
    ],
)
def test_search_finds_fastest_of_all_layouts(words, cluster):
    case, machine = complete_words(words.split()), load_cluster(cluster)
    found = search(case, machine, shown=3)
    every = [
        (one, plan) for one in sort_by_bound(case, machine) if (plan := plan_alternative(one, machine)) is not None
    ]
    assert len(every) > 30
    for one, plan in every:
        assert one.least <= plan.step.seconds, one.words
        assert one.bytes <= plan.memory, one.words
        least = Pieces.of(plan.explained, machine).compute_least_seconds(plan.explained, machine)
        assert least <= plan.step.seconds * (1 + 1e-9), one.words
    allowed = sorted(plan.step.seconds for one, plan in every if check_run(one.run) is None)
    assert [one.plan.step.seconds for one in found.fit] == pytest.approx(allowed[:3])
    assert found.large == ()


@pytest.mark.parametrize("bandwidth", [5e8, 5e10])
@pytest.mark.parametrize("words", ["", "moe=on moe.experts=4", "run.recompute=none"])
def test_alternatives_are_iterated_in_bound_order(words, bandwidth):
    """Compare with a full sort; alternatives with recomputation get their bound only when they may be next."""
    case = complete_words([*WORDS.split(), "batch.sequence_length=4096", *words.split()])
    slow = load_cluster("h100_ib").replace_numbers({"link.cluster.bandwidth": Quantity(bandwidth, "a test")})
    every, found = sort_by_bound(case, slow), list(iterate_by_bound(case, slow))
    assert len(every) > 100
    assert [(one.least, one.words) for one in found] == [(one.least, one.words) for one in every]
    assert all(one.floor <= one.least for one in every)


@pytest.mark.parametrize("bandwidth", [5e8, 5e10])
@pytest.mark.parametrize("compiled", ["on", "off"])
def test_bound_holds_with_overlapped_transfers(bandwidth, compiled):
    words = (
        f"parallel=3d launch.processes=32 {SIZES} batch.global_size=64 run.compile={compiled} {MODEL} model.layers=16"
    )
    slow = load_cluster("h100_ib").replace_numbers({"link.cluster.bandwidth": Quantity(bandwidth, "a test")})
    chance, case = random.Random(0), complete_words(words.split())
    compared, chunked = 0, 0
    for one in chance.sample(sort_by_bound(case, slow), 60):
        plan = plan_alternative(one, slow)
        if plan is not None:
            assert one.least <= plan.step.seconds, one.words
            compared, chunked = compared + 1, chunked + (len(plan.explained.ranks[0].stages) > 1)
    assert compared > 40
    assert chunked > 5


@pytest.mark.parametrize("node", [4, 8])
def test_bound_holds_with_shared_cores(node):
    """Check also that a stage that fills a node is as fast as on a cluster without shared cores."""
    plain = load_cluster("h100_ib")
    plain = replace(plain, topology=replace(plain.topology, gpus_per_node=node))
    shares = plain.replace_numbers({"node.alone": Quantity(3.0, "a test")})
    same, faster = 0, 0
    for one in random.Random(0).sample(sort_by_bound(complete_words(WORDS.split()), shares), 60):
        plan = plan_alternative(one, shares)
        if plan is None:
            continue
        explained = plan.explained
        assert one.least <= plan.step.seconds, one.words
        assert Pieces.of(explained, shares).compute_least_seconds(explained, shares) <= plan.step.seconds * (
            1 + 1e-9
        ), one.words
        assert sum(plan.step.kinds.values()) == pytest.approx(plan.step.seconds)
        alike = forecast(explained, plain).step
        if 8 // explained.mesh.size("pp") >= node:
            assert plan.step.seconds == pytest.approx(alike.seconds), one.words
            same += 1
        else:
            assert plan.step.seconds < alike.seconds, one.words
            faster += 1
    assert min(same, faster) > 5


def test_every_dimension_is_searched():
    tried = [one.words for one in sort_by_bound(complete_words([*WORDS.split(), "moe=on"]), load_cluster("h100_ib"))]
    names = {word.partition("=")[0] for words in tried for word in words}
    axes = {f"parallel.{name}" for name in ("tp", "pp", "cp", "dp_shard", "zero", "schedule", "chunks")}
    assert axes | {"moe.ep", "batch.micro_size", "run.recompute"} <= names


@pytest.mark.parametrize("words", ["", "lora=on", "model.layers=1"])
def test_layouts_that_do_not_divide_are_skipped(words):
    """Search layouts of the default model: its 6 heads do not divide over 4 ranks."""
    case = complete_words(f"parallel=3d launch.processes=8 {SIZES} parallel.zero=1 {words}".split())
    found = search(case, load_cluster("h100_ib"))
    assert found.fit
    assert {one.plan.explained.mesh.size("tp") for one in found.every} <= {1, 2}


def test_search_without_valid_layout_gives_reason():
    case = complete_words(["parallel=3d", "launch.processes=8", *SIZES.split(), "parallel.tp=4"])
    with pytest.raises(UserError, match="tp") as refusal:
        search(case, load_cluster("h100_ib"))
    assert refusal.value.details


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("launch.processes=8", "3d"),
        ("launch.processes=3", "3d"),
        ("parallel.tp=2", "3d"),
        ("launch.processes=8 parallel.bucket_mb=2", "ddp"),
        ("launch.processes=16 parallel.topology.gpus_per_node=4", "3d"),
        ("launch.processes=1", None),
        ("parallel.groups=2", None),
        ("launch.processes=8 parallel.none_has_this=2", None),
    ],
)
def test_search_assumes_strategy_with_most_layouts(words, name):
    assert choose_strategy(words.split()) == ((f"parallel={name}",) if name else ())


def test_search_commands_name_assumed_strategy(capsys):
    words = [*WORDS.split()[1:], "parallel.tp=2", "parallel.zero=1", "cluster=h100_ib"]
    assert main(["plan", "search", *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith("assumed: parallel=3d\n")
    lines = [line for line in said.splitlines() if "  train " in line]
    assert len(lines) > 3
    assert all(" parallel=3d " in line for line in lines)


def test_oversized_layouts_report_missing_memory():
    small = load_cluster("h100_ib").replace_numbers({"memory.bytes": Quantity(25e6, "a test")})
    found = search(complete_words(WORDS.split()), small, shown=4)
    assert len(found.fit) == len(found.large) == 4
    assert all(one.plan.memory <= 25e6 for one in found.fit)
    assert [one.lacks for one in found.large] == sorted(one.plan.memory - 25e6 for one in found.large)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_search_error_suggests_how_to_fit(flags, tmp_path, capsys):
    small = load_cluster("h100_ib").replace_numbers({"memory.bytes": Quantity(1e6, "a test")})
    save_cluster(small, tmp_path / "small.yaml")
    words = [*WORDS.split(), "parallel.tp=2", "batch.micro_size=2", f"cluster={tmp_path / 'small.yaml'}"]
    assert main(["plan", "search", *words, f"--svg={tmp_path / 'none.svg'}", *flags]) == 2
    said = capsys.readouterr()
    if flags:
        assert json.loads(said.out)["layouts"][0]["lacks_bytes"] > 0
    else:
        assert "no layout fits\nlayouts that do not fit, by missing memory\n" in said.out
    lines = said.err.splitlines()
    assert lines[0] == "gangline plan: no layout that the overrides allow fits into memory."
    assert lines[1].startswith("  Closest to fitting  parallel.")
    assert lines[2] == "  Leave these options unset:  parallel.tp=2 batch.micro_size=2"
    assert lines[3] == "  Use more ranks, such as  launch.processes=16; or shorter sequences."
    assert not (tmp_path / "none.svg").exists()


def test_search_advises_sharding_for_single_strategy(capsys, tmp_path):
    small = load_cluster("h100_ib").replace_numbers({"memory.bytes": Quantity(1e6, "a test")})
    save_cluster(small, tmp_path / "small.yaml")
    words = ["parallel=single", "launch.processes=1", *MODEL.split(), f"cluster={tmp_path / 'small.yaml'}"]
    assert main(["plan", "search", *words]) == 2
    assert "a strategy that shards the model, such as  launch.processes=2 parallel=3d" in capsys.readouterr().err


def test_chosen_layout_is_close_to_fastest():
    """Choose a layout where the run's own layout does not fit into memory."""
    case, small = complete_words([*WORDS.split(), "batch.micro_size=2"]), load_cluster("h100_ib")
    would = forecast(explain(case, case.run, small), small)
    small = small.replace_numbers({"memory.bytes": Quantity(0.9 * would.memory, "a test")})
    plan, words = choose_plan(case, small, None)
    assert plan.fits
    assert any(word.startswith("parallel.") for word in words)
    assert plan.step.seconds <= (1 + NEAR) * search(case, small, shown=1).fit[0].plan.step.seconds


def test_pareto_front_has_no_dominated_layout():
    front = search(complete_words(WORDS.split()), load_cluster("h100_ib")).pareto
    seconds, memory = [one.plan.step.seconds for one in front], [one.plan.memory for one in front]
    assert seconds == sorted(seconds)
    assert memory == sorted(memory, reverse=True)


def test_each_search_result_passes_check(capsys):
    assert main(["plan", "search", *WORDS.split(), "parallel.tp=2", "cluster=h100_ib", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows, front = found["layouts"], found["front"]
    assert len(rows) > 3
    assert front[0]["step_seconds"] == rows[0]["step_seconds"]  # the fastest layout that fits is first in both lists
    assert front[-1]["memory_bytes"] == min(row["memory_bytes"] for row in [*rows, *front])
    for row in rows:
        run = compose_one([*WORDS.split(), "parallel.tp=2", *row["words"]])
        assert check_run(run) is None
        assert row["mesh"]["tp"] == 2
