"""Problems found before a run starts: numbers, layouts, batch, memory, machines; all in one message."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gangline.config.check import check, count_ranks
from gangline.config.defaults import build_default_run
from gangline.config.fields import get_defaults, resolve_hints
from gangline.config.sections import SECTIONS
from gangline.config.values import InvalidValue, convert
from gangline.errors import Problem, UserError
from gangline.plugin.registry import installed
from gangline_basics.launch import memory
from gangline_basics.launch.config import LocalLaunch
from gangline_basics.parallel.config import Ddp

pytestmark = pytest.mark.usefixtures("core_alone")


def refused(**given) -> str:
    with pytest.raises(UserError) as caught:
        check(build_default_run(**given))
    return str(caught.value)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    (tmp_path / "b.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    return str(tmp_path)


def test_error_in_a_check_names_the_part(monkeypatch):
    def fails(self, run):
        raise TypeError("of all things")

    monkeypatch.setattr(Ddp, "check", fails)
    with pytest.raises(TypeError, match="of all things") as caught:
        check(build_default_run(parallel="ddp", launch=LocalLaunch(processes=2)))
    assert "raised by the check of parallel=ddp (gangline" in caught.value.__notes__[0]


def test_default_run_passes_check():
    check(build_default_run())


def test_model_larger_than_machine_memory_is_refused():
    said = refused(model="llama3-405b", run={"device": "cpu"})
    assert "model=llama3-405b precision=fp32 optimizer=adamw needs 6,494 GB of memory, but this machine has " in said
    assert "406 G parameters, 1 CPU process: weights 1,623, gradients 1,623, optimizer state 3,247 GB" in said
    assert "model=tiny" in said
    assert "launch=elastic launch.nodes=N" in said
    check(
        build_default_run(model="llama3-405b", run={"device": "cpu"}, launch="elastic")
    )  # elastic nodes may be other machines


def test_memory_is_counted_for_each_replica():
    alone = build_default_run()
    one, all_ranks = memory.count_one_copy(alone), memory.state_of_all_ranks(build_default_run(parallel="ddp"), 2)
    assert all_ranks == {kind: 2 * size for kind, size in one.items()}
    assert one["weights"] == one["gradients"] > 4e6


@pytest.mark.parametrize(("limit", "bytes_"), [("4096\n", 4096 + 2048), ("max\n", None), (None, None)])
def test_machine_memory_is_the_limit_of_the_container(tmp_path, limit, bytes_):
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nSwapTotal:       2 kB\n")
    if limit is not None:
        (tmp_path / "max").write_text(limit)
    without = memory.read_machine_bytes(str(tmp_path / "absent"), str(tmp_path / "absent"))
    found = memory.read_machine_bytes(str(tmp_path / "meminfo"), str(tmp_path / "max"))
    assert found == (without + 2048 if bytes_ is None else bytes_)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("run", {"steps": 0}, "run.steps=0 must be at least 1."),
        ("batch", {"global_size": 0}, "batch.global_size=0 must be at least 1."),
        ("batch", {"micro_size": -1}, "batch.micro_size=-1 must be at least 1."),
        ("batch", {"sequence_length": 0}, "batch.sequence_length=0 must be at least 1."),
        ("validate", {"every": 0}, "validate.every=0 must be at least 1."),
        ("validate", {"samples": 0}, "validate.samples=0 must be at least 1."),
        ("launch", LocalLaunch(processes=0), "launch.processes=0 must be at least 1."),
    ],
)
def test_number_below_minimum_is_refused(section, values, message):
    assert message in refused(**{section: values})


def test_indivisible_global_batch_suggests_nearest_sizes():
    message = refused(parallel="ddp", launch=LocalLaunch(processes=3))
    assert message.startswith("batch.global_size=16 is not divisible by 3 data-parallel ranks.")
    assert "Nearest: batch.global_size=15 or batch.global_size=18" in message
    assert "a data-parallel width among 1, 2, 4, 8, 16" in message


def test_more_ranks_than_sequences_is_refused():
    message = refused(parallel="ddp", launch=LocalLaunch(processes=4), batch={"global_size": 2})
    assert "Nearest: batch.global_size=4;" in message


def test_indivisible_microbatch_lists_valid_sizes():
    message = refused(parallel="ddp", launch=LocalLaunch(processes=2), batch={"micro_size": 3})
    assert "batch.micro_size=3 does not divide 8 (batch.global_size=16 / 2 data-parallel ranks)." in message
    assert "Choose batch.micro_size among 1, 2, 4, 8" in message


def test_single_strategy_refuses_two_processes():
    message = refused(parallel="single", launch=LocalLaunch(processes=2))
    assert "parallel=single supports one process, and this job has 2 processes." in message


def test_axis_sizes_not_matching_world_are_refused(monkeypatch):
    monkeypatch.setattr(Ddp, "size_axes", lambda self, world: {"dp_replicate": 2, "tp": 3})
    message = refused(parallel="ddp", launch=LocalLaunch(processes=4))
    assert "the axes of parallel=ddp give dp_replicate 2 x tp 3 = 6 ranks, but this run has 4 processes." in message


def test_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("gangline.config.check.count_gpus", lambda: 0)
    assert "run.device=cuda: this machine has no GPU." in refused(run={"device": "cuda"})
    assert refused(run={"device": "gpu"}).splitlines() == [
        "run.device=gpu must be cpu, cuda or cuda:N.",
        "  The name of a GPU is cuda.",
        "  Type run.device=cpu or run.device=null: this machine has no GPU.",
    ]
    assert "Did you mean cuda?" in refused(run={"device": "cuad:0"})
    check(build_default_run(run={"device": "cpu"}))
    monkeypatch.setattr("gangline.config.check.count_gpus", lambda: 2)
    check(build_default_run(run={"device": "cuda:1"}))
    assert "run.device=cuda:2: this machine has 2 GPUs, numbered from 0." in refused(run={"device": "cuda:2"})


def test_all_problems_are_reported_in_one_message(corpus):
    message = refused(run={"steps": 0}, batch={"global_size": -1}, launch=LocalLaunch(max_restarts=-1))
    assert message.startswith("3 problems:")
    assert "1. run.steps=0" in message
    assert "3. launch.max_restarts=-1" in message


def said(run) -> str:
    try:
        check(run)
    except UserError as error:
        return str(error)
    return ""


def takes_numbers(hint) -> bool:
    try:
        return isinstance(convert(hint, -1), int | float)
    except InvalidValue:
        return False


@pytest.mark.parametrize(
    "parts", [{}, {"optimizer": "muon", "schedule": "wsd", "precision": "fp16", "parallel": "ddp"}]
)
def test_invalid_number_is_reported_once(parts):
    """Set each numeric option in turn to -1, which most of them refuse."""
    refused = 0
    places = [*build_default_run(**parts).iterate_parts(), *((name, cls()) for name, cls in SECTIONS.items())]
    for place, name in ((place, name) for place, config in places for name in get_defaults(type(config))):
        run = build_default_run(**parts)
        config = dict([*run.iterate_parts(), *run.iterate_sections()])[place]
        if takes_numbers(resolve_hints(type(config))[name]):
            setattr(config, name, -1)
            times = said(run).count(f"{place}.{name}=-1")
            assert times <= 1, said(run)
            refused += times
    assert refused >= 20


def test_a_missing_corpus_is_found_before_the_start(tmp_path):
    run = build_default_run()
    run.data.path = str(tmp_path / "nothing")
    with pytest.raises(UserError, match="nothing"):
        check(run)


def test_problem_of_nested_part_is_reported(strangers, monkeypatch):
    strangers.add(
        "gangline-hats",
        """
from dataclasses import dataclass, field
from gangline import Part, hookimpl
from gangline.errors import Problem
from gangline.config.schema import EditConfig, PartConfig

@dataclass
class Feather(PartConfig):
    def check(self, run):
        return [Problem("the feather is missing.")]

@dataclass
class Hat(EditConfig):
    feather: PartConfig = field(default_factory=Feather)

@hookimpl
def gangline_model_edits():
    yield Part(group="hat", name="on", config=Hat, build="gangline_hats:hat", summary="A hat", opens={"feather": "red"})

@hookimpl
def gangline_parts():
    yield Part(group="hat/feather", name="red", config=Feather, build="gangline_hats:feather", summary="A feather")
""",
    )
    monkeypatch.syspath_prepend(str(strangers.site))
    installed.cache_clear()
    try:
        assert refused(hat="on") == "the feather is missing."
    finally:
        installed.cache_clear()


# --- number of processes ---


def test_world_size_is_set_by_user_or_strategy(monkeypatch):
    monkeypatch.setattr("gangline.launch.devices.count_gpus", lambda device=None: 0)
    assert count_ranks(build_default_run(parallel="ddp", launch=LocalLaunch(processes=5))) == 5
    assert count_ranks(build_default_run(parallel="ddp")) == 2
    assert count_ranks(build_default_run()) == 1


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


def test_world_size_is_taken_from_torchrun(monkeypatch):
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    assert count_ranks(build_default_run(parallel="ddp")) == 4
    check(build_default_run(parallel="ddp"))
    message = refused(parallel="ddp", launch=LocalLaunch(processes=2))
    assert "launch.processes=2, but torchrun started 4 processes." in message


@dataclass(frozen=True)
class Case:
    problems: list[Problem]
    text: str


@pytest.mark.parametrize(
    "case",
    [
        Case([Problem("a.", "b.", "c.")], "a.\n  b.\n  c."),
        Case([Problem("a.")], "a."),
        Case([Problem("a.", "b."), Problem("c.", "", "d.")], "2 problems:\n  1. a.\n     b.\n  2. c.\n     d."),
    ],
)
def test_problems_are_formatted_as_one_message(case):
    assert str(UserError.of(case.problems)) == case.text
