"""`gangline plan`: printed report, sums of its parts, assumptions, refused arguments."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from gangline.cli.main import main
from gangline.model.tree import Node, replace_node
from gangline_basics.cluster.file import SHIPPED, Quantity, load_cluster
from gangline_planner.assumed import complete_words, explain
from gangline_planner.choose import choose_plan
from gangline_planner.forecast import forecast
from gangline_planner.page import format_plan
from gangline_planner.price.transfers import compute_transfer_seconds

LLAMA = "parallel=3d model=llama3-405b launch.processes=16384 cluster=h100_ib"
SMALL = "parallel=3d launch.processes=8 batch.global_size=16 batch.sequence_length=128 precision=bf16 cluster=h100_ib"


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    """Return a function that runs `gangline plan` and returns its exit code and output."""
    monkeypatch.chdir(tmp_path)

    def run(words: str) -> tuple[int, str]:
        code = main(["plan", *words.split()])
        said = capsys.readouterr()
        assert not (said.out and said.err)
        return code, said.out + said.err

    return run


def plan_of(words: str, **numbers: float):
    case = complete_words(words.split())
    cluster = load_cluster("h100_ib").replace_numbers(
        {name.replace("__", "."): Quantity(value, "a test") for name, value in numbers.items()}
    )
    return forecast(explain(case, case.run, cluster), cluster, tokens=1e12)


def test_time_by_kind_sums_to_step_time(say):
    code, text = say(f"{SMALL} --json")
    assert code == 0
    found = json.loads(text)
    assert sum(found["seconds"].values()) == pytest.approx(found["step_seconds"])
    assert all(seconds >= -1e-9 for seconds in found["seconds"].values())
    assert sum(found["memory"].values()) == found["memory_bytes"]
    assert found["tokens_per_second"] == pytest.approx(16 * 128 / found["step_seconds"])


def test_plan_prints_assumed_overrides_for_llama_405b(say):
    code, text = say(f"{LLAMA} --tokens 15e12")
    assert code == 0
    assert "assumed: batch.global_size=2048 batch.micro_size=1 batch.sequence_length=8192 " in text
    assert "GB free" in text
    assert "US dollars at 4.916 per accelerator and hour (Amazon EC2 Capacity Blocks" in text
    words = next(line for line in text.splitlines() if line.startswith("assumed: ")).split()[1:]
    again = say(f"{LLAMA} {' '.join(words)} --tokens 15e12")[1]
    assert not again.splitlines()[3].startswith("assumed")
    assert again.splitlines()[7:] == text.splitlines()[8:]  # the assumed overrides give the same plan


SIZES = {"precision": "bf16", "batch.sequence_length": "8192", "batch.global_size": "512"}


@pytest.mark.parametrize("named", [(), *((name,) for name in SIZES), tuple(SIZES)])
def test_plan_assumes_each_unset_size_independently(named):
    given = [f"{name}={SIZES[name]}" for name in named]
    case = complete_words(["parallel=fsdp", "model=llama3-8b", "launch.processes=64", *given])
    micro = () if {"batch.sequence_length", "batch.global_size"} <= set(named) else ("batch.micro_size=1",)
    assert {*given, *case.assumed} == {*(f"{name}={value}" for name, value in SIZES.items()), *micro}
    assert (case.run.batch.sequence_length, case.run.batch.global_size) == (8192, 512)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("batch.sequence_length=128 launch.processes=64", (128, 32768, 64)),
        ("batch.sequence_length=1000 launch.processes=24", (1000, 4224, 8)),
        ("batch.micro_size=3 launch.processes=8", (8192, 528, 3)),
        ("launch.processes=16384", (8192, 2048, 1)),
        ("batch.global_size=8", (8192, 8, 1)),
        ("batch.ramp={4:8} batch.micro_size=2", (8192, 16, 2)),
        ("recipe=quick", (32, 4, None)),
    ],
)
def test_plan_assumes_a_batch_of_4m_tokens(words, sizes):
    batch = complete_words(words.split()).run.batch
    assert (batch.sequence_length, batch.global_size, batch.micro_size) == sizes


def test_plan_reports_batch_precision_and_expected_error(say):
    code, text = say(SMALL)
    assert code == 0
    assert "\n16 sequences of 128 tokens a step, in bf16\n" in text
    assert "\nexpected error of the step time: median 6%, 90th percentile 19%, 3% too short on average" in text
    assert json.loads(say(f"{SMALL} --json")[1])["expected_error"]["median"] == 0.0585


def test_single_rank_has_no_communication_time():
    plain = plan_of("parallel=single batch.global_size=16 batch.sequence_length=128 batch.micro_size=4")
    assert plain.step.kinds["tp"] == plain.step.kinds["dp"] == plain.step.kinds["bubble"] == pytest.approx(0)
    assert plain.step.kinds["jitter"] == 0  # one rank has no jitter
    fast = plan_of(
        "parallel=single batch.global_size=16 batch.sequence_length=128 batch.micro_size=4",
        module__seconds=0,
        host__seconds=0,
    )
    assert fast.step.seconds < plain.step.seconds - 0.0099


def test_pipeline_transfers_are_separate_from_bubble():
    """Plan 1F1B with the slowest stage last: it waits for 3 messages at the start, the first stage for 3 at the end."""
    words = "parallel=pp launch.processes=4 batch.global_size=16 batch.micro_size=1 model.layers=4"
    still, sends = (
        plan_of(words, module__seconds=0.1, link__node__latency=seconds, link__node__bandwidth=1e30).step.kinds
        for seconds in (0.0, 1e-3)
    )
    assert still["pp"] == 0
    assert sends["pp"] == pytest.approx(6e-3)
    assert sends["bubble"] == pytest.approx(still["bubble"])
    assert still["bubble"] > 1


@pytest.mark.parametrize("kind", ["tp", "dp", "pp"])
def test_slower_links_lengthen_time_of_each_axis(kind):
    words = "parallel=3d launch.processes=16 batch.global_size=32 model=llama3-8b batch.sequence_length=2048"
    slow = plan_of(words, link__node__bandwidth=45e9, link__cluster__bandwidth=5e9)
    assert slow.step.kinds[kind] > plan_of(words).step.kinds[kind]


def test_two_datacentres_reduce_gradients_over_fibre():
    """Compare with the closed form: each of 4,096 shards goes to the other replica, and as many bytes come back."""
    page = (Path(__file__).parent.parent / "docs/how-to/what-will-it-cost.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    said = next(block for block in blocks if "nodes_per_datacentre" in block["network"])
    numbers = {name: Quantity(float(of["value"]), of["source"]) for name, of in said["numbers"].items()}
    cluster = load_cluster("h100_ib").replace_numbers(numbers)
    cluster = replace(cluster, topology=replace(cluster.topology, nodes_per_datacentre=512))
    words = "parallel=hsdp parallel.dp_shard=4096 parallel.dp_replicate=2 model=llama3-8b launch.processes=8192"
    case = complete_words([*words.split(), "batch.global_size=8192", "batch.sequence_length=8192", "precision=bf16"])
    found = explain(case, case.run, cluster)
    (sent,) = [sent for sent in found.ranks[0].transfers if sent.tier == "fibre"]
    assert sent.axes == ("dp_replicate",)
    assert sent.bytes == pytest.approx(found.parameters * case.run.precision.get_sizes().wire / 4096, rel=0.01)
    speed, late = 9.8e7 * 0.8, 2 * 2e-3
    assert compute_transfer_seconds(sent, cluster) == pytest.approx(sent.bytes / speed + sent.calls * late)
    near = replace(cluster, topology=replace(cluster.topology, nodes_per_datacentre=None))
    other = explain(case, case.run, near)
    assert "fibre" not in {sent.tier for sent in other.ranks[0].transfers}
    assert forecast(found, cluster).step.kinds["dp"] > forecast(other, near).step.kinds["dp"]


def test_cost_is_days_times_price(tmp_path, say):
    given = yaml.safe_load((SHIPPED / "h100_ib.yaml").read_text())
    given["numbers"]["price.hour"] = {"value": 2.0, "source": "a contract"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(given))
    code, text = say(f"{SMALL.replace('h100_ib', 'mine.yaml')} --tokens 1e9 --json")
    assert code == 0
    found = json.loads(text)
    assert found["dollars"] == pytest.approx(found["days"] * 24 * 8 * 2.0)
    assert found["days"] == pytest.approx(1e9 / found["tokens_per_second"] / found["goodput"] / 86400)


def test_budget_and_tokens_convert_both_ways(say):
    words = f"{SMALL} --price 2 --json"
    bought = json.loads(say(f"{words} --budget 960")[1])
    assert bought["days"] == pytest.approx(960 / (24 * 8 * 2))
    assert bought["tokens"] == bought["budget_tokens"] == pytest.approx(bought["days"] * bought["tokens_per_day"])
    assert json.loads(say(f"{words} --tokens {bought['tokens']!r}")[1])["dollars"] == pytest.approx(960)
    both = json.loads(say(f"{words} --tokens 1e6 --budget 960")[1])
    assert both["tokens"] == 1e6
    assert both["budget_tokens"] == bought["tokens"]


def test_budget_without_known_price_is_refused(say):
    code, text = say(f"{SMALL.replace('h100', 'b200')} --budget 960")
    assert code == 2
    assert text.startswith("gangline plan: --budget needs the price of b200_ib, which is unknown.")
    assert "--price=DOLLARS" in text
    assert "price unknown: price.hour is missing in b200_ib" in say(f"{SMALL.replace('h100', 'b200')} --tokens 1e9")[1]


def test_goodput_follows_young_daly_interval(say):
    """Compare goodput and checkpoint interval with the formulas of Young and Daly, for the plan's own save time."""
    from gangline.explain.reliability import Reliability

    found = json.loads(say(f"{SMALL} --mtbf 2 --tokens 1e9 --json")[1])
    rare = json.loads(say(f"{SMALL} --mtbf 200 --tokens 1e9 --json")[1])
    assert found["mtbf_seconds"] == pytest.approx(7200)
    every, step = found["checkpoint_interval_seconds"], found["step_seconds"]
    known = Reliability(7200, found["checkpoint_stall_seconds"] * every / step, 600)
    assert every == pytest.approx(known.compute_young_daly())
    assert found["goodput"] == pytest.approx(known.compute_ettr(every))
    assert rare["goodput"] > found["goodput"]
    assert found["days"] == pytest.approx(1e9 / found["tokens_per_second"] / found["goodput"] / 86400)
    assert "failures leave no time to train" in say(f"{SMALL} --mtbf 0.001 --tokens 1e9")[1]


def test_slow_data_loading_lengthens_step():
    words = "parallel=single batch.global_size=16 batch.sequence_length=128 batch.micro_size=4"
    fast, slow = plan_of(words, storage__read=1e12), plan_of(words, storage__read=1e5)
    assert fast.step.kinds["data"] == 0
    assert slow.step.kinds["data"] > 0
    read = slow.explained.tokens * 4 / 1e5  # one rank reads all data; the rest of the step overlaps with it
    assert slow.step.seconds == pytest.approx(read + slow.step.kinds["jitter"])


def test_fitting_layout_of_run_is_planned():
    case = complete_words(SMALL.rsplit(" ", 1)[0].split())
    plan, assumed = choose_plan(case, load_cluster("h100_ib"), None)
    assert assumed == ()
    assert dict(plan.explained.mesh.sizes) == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (SMALL.replace("h100_ib", "h100_bi"), ["cluster=h100_bi does not exist.", "h100_ib"]),
        (SMALL.replace(" cluster=h100_ib", ""), ["no cluster is given for the plan.", "cluster=NAME"]),
        (f"{SMALL} parallel.tp=3", ["tp 3 does not fit 8 processes.", "parallel.tp=2"]),
        (f"{SMALL} --tokens lots", ["--tokens lots: expected a number above 0."]),
        (f"{SMALL} --token 3", ["there is no flag --token.", "Did you mean --tokens?"]),
        (f"{SMALL} --tokens", ["--tokens needs a value."]),
        (f"{SMALL} --tokens 0", ["--tokens 0: expected a number above 0.", "--tokens 15e12"]),
        (f"{SMALL} --tokens nan", ["expected a number above 0."]),
        (f"{SMALL} --budget 1e400", ["--budget 1e400: expected a number between 1e-24 and 1e+24."]),
        (f"{SMALL} --svg nowhere/plan.svg", ["cannot be written.", "mkdir -p nowhere"]),
        (f"{SMALL} parallel.tx=2", ["there is no option parallel.tx"]),
        ("table cluster=h100_ib llama", ["gangline plan: table accepts only cluster=NAME|FILE, got llama."]),
    ],
)
def test_invalid_plan_arguments_are_refused(say, words, messages):
    code, text = say(words)
    assert code == 2
    assert text.startswith("gangline plan: ")
    for message in messages:
        assert message in text
    assert "Traceback" not in text


def test_cluster_file_of_another_version_is_refused(tmp_path, say):
    given = yaml.safe_load((SHIPPED / "h100_ib.yaml").read_text())
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(given | {"version": 7}))
    code, text = say(SMALL.replace("h100_ib", "old.yaml"))
    assert code == 2
    assert text.startswith("gangline plan: old.yaml is a cluster file of version 7.")
    assert "This version of gangline reads cluster files of version 1." in text
    assert "Traceback" not in text


def test_module_without_cost_gives_lower_bound():
    case, cluster = complete_words(SMALL.rsplit(" ", 1)[0].split()), load_cluster("h100_ib")
    found = explain(case, case.run, cluster)
    assert found.unknown == ()
    strange = replace(found.work[0], unknown=("blocks.0.oracle",), unknown_flops=10**15)
    plan = forecast(replace(found, work=(strange, *found.work[1:])), cluster)
    said = format_plan(plan, case.run, [])
    assert "unknown cost of blocks.0.oracle: at least" in said
    assert plan.step.unknown > 1  # 3 passes of 10^15 FLOPs at less than 10^15 FLOP/s, divided over the ranks


def test_node_without_declared_cost_is_reported():
    """Use a third-party node, whose module may have parameters that no closed form counts."""

    @dataclass(frozen=True, kw_only=True)
    class Silent(Node):
        module: ClassVar[str] = "nowhere:Silent"

    case, cluster = complete_words(["parallel=single", "launch.processes=1"]), load_cluster("h100_ib")
    assert explain(case, case.run, cluster).unknown == ()
    tree, rules = case.model
    tree = replace_node(tree, "blocks.0.feed_forward", Silent())
    found = explain(replace(case, model=(tree, rules)), case.run, cluster)
    assert found.unknown == ("blocks.0.feed_forward",)
    said = format_plan(forecast(found, cluster), case.run, [])
    assert "unknown cost of blocks.0.feed_forward: their parameters and operations are unknown" in said


def test_step_times_are_never_negative(say):
    """Check a step without a pipeline, where rounding errors must not become negative times."""
    found = json.loads(say(f"{SMALL} parallel.pp=1 --json")[1])
    assert found["seconds"]["pp"] == found["seconds"]["bubble"] == 0.0
    assert min(found["seconds"].values()) >= 0.0


def test_plan_needs_no_torch():
    script = (
        "import sys; from gangline.cli.main import main; "
        f"assert main(['plan', *'{SMALL}'.split()]) == 0; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_oversized_layout_has_no_goodput_or_cost(say):
    words = "parallel=single model=llama3-70b batch.micro_size=1 run.recompute=full cluster=h100_ib --price 2"
    code, text = say(f"{words} --tokens 1e9 --budget 960 --mtbf 2000")
    assert code == 0
    lines = text.splitlines()
    assert "DOES NOT FIT" in text
    assert lines[-1].startswith(
        "the layout does not fit into memory, so goodput, days, money and tokens are not computed"
    )
    assert not any(word in line for word in ("goodput", "US dollars", "days", "MWh") for line in lines[:-1])
    found = json.loads(say(f"{words} --budget 960 --mtbf 2000 --json")[1])
    assert not found["fits"]
    of_time = {"days", "goodput", "checkpoint_interval_seconds", "checkpoint_stall_seconds", "simulated"}
    of_money = {"dollars", "dollars_per_day", "megawatt_hours", "electricity_dollars"}
    of_tokens = {"tokens", "tokens_per_day", "budget_tokens"}
    assert {name: found[name] for name in of_time | of_money | of_tokens if found[name] is not None} == {}
