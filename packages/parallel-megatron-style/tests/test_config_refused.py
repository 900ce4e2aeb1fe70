"""Impossible layouts: one message from `train` with the nearest possible layout, exit code 2, no rank started."""

from __future__ import annotations

import pytest

from gangline.cli.train import main
from gangline.config.defaults import build_default_run
from gangline.errors import Problem
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.plan import Fold, Plan, ShardRule
from gangline_basics.launch import forkserver
from gangline_basics.launch.config import LocalLaunch
from gangline_parallel_megatron_style.config import Fsdp, Hsdp, Pp, ThreeD, Tp
from gangline_parallel_megatron_style.layout import fits
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Return a function that runs `train` in a temporary directory, expects a refusal and returns the error.

    The fork server is not started.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forkserver, "warm", lambda more=(): None)

    def refused(words: str) -> str:
        assert main(words.split()) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert not list(tmp_path.iterdir())
        assert said.err.startswith("train: ")
        return said.err.removeprefix("train: ").rstrip()

    return refused


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            "parallel=tp launch.processes=4",
            ["parallel.tp=4 does not divide model.heads=6.", "parallel.tp=2; or parallel.tp=1; or launch.processes=2"],
        ),
        (
            "parallel=tp launch.processes=5 model.heads=5 model.kv_heads=5 model.dim=160 model.ffn_dim=512",
            ["parallel.tp=5 does not divide model.ffn_dim=512.", "launch.processes=1"],
        ),
        (
            "parallel=tp launch.processes=3 model.heads=6 model.kv_heads=2 model.ffn_dim=96 batch.sequence_length=96",
            ["parallel.tp=3 does not divide model.kv_heads=2.", "launch.processes=6; or launch.processes=2"],
        ),
        (
            "parallel=tp launch.processes=16 model.heads=16 model.kv_heads=16 model.dim=256",
            ["parallel.tp=16 is larger than a node, which has 8 GPUs.",
             "parallel.tp=8; or parallel.tp=4", "parallel.force=true"],
        ),
        (
            "parallel=3d launch.processes=4 parallel.pp=1 batch.sequence_length=127",
            ["batch.sequence_length=127 does not divide over tp 2 (sequence parallelism).",
             "Nearest: batch.sequence_length=126 or batch.sequence_length=128; or parallel.sequence_parallel=false"],
        ),
        (
            "parallel=3d launch.processes=4 parallel.cp=2 parallel.tp=1 batch.sequence_length=126",
            ["batch.sequence_length=126 does not divide over cp 2.", "multiple of 4", "an early and a late chunk",
             "Nearest: batch.sequence_length=124 or batch.sequence_length=128"],
        ),
        (
            "parallel=3d launch.processes=4 parallel.cp=2 batch.sequence_length=2",
            ["does not divide over cp 2 x tp 2", "Nearest: batch.sequence_length=4"],
        ),
        (
            "parallel=3d launch.processes=8 parallel.cp=4 parallel.pp=1 parallel.tp=2 parallel.context=ulysses",
            ["parallel.cp=4 does not divide the 3 heads of a rank with parallel.tp=2.", 
             "parallel.context=ring; or parallel.cp=1"],
        ),
        (
            "parallel=pp launch.processes=8",
            ["parallel.pp=8 makes 8 stages, and the model has 4 blocks.", "parallel.pp=4; or parallel.pp=2"],
        ),
        (
            "parallel=pp launch.processes=4 parallel.schedule=zb_v",
            ["parallel.pp=4 with 2 chunks per rank makes 8 stages, and the model has 4 blocks.",
             "parallel.schedule=1f1b; or parallel.pp=2"],
        ),
        (
            "parallel=pp parallel.stages=[3,2]",
            ["parallel.stages=[3, 2] has 2 stages and 5 blocks.",
             "parallel.pp=2 makes 2 stages", "parallel.stages=[2,2]"],
        ),
        ("parallel=pp parallel.stages=[4,0]", ["parallel.stages=[4,0] must each be at least 1."]),
        ("parallel=pp parallel.stages=[]", ["parallel.stages=[] has 0 stages and 0 blocks."]),
        (
            "parallel=pp parallel.chunks=3",
            ["parallel.chunks=3: parallel.schedule=1f1b has exactly 1 chunk per rank.", "parallel.chunks=null"],
        ),
        (
            "parallel=pp parallel.schedule=dualpipe_v parallel.chunks=3",
            ["parallel.chunks=3: parallel.schedule=dualpipe_v has exactly 2 chunks per rank."],
        ),
        (
            "parallel=pp parallel.schedule=interleaved_1f1b parallel.chunks=1",
            ["parallel.chunks=1: parallel.schedule=interleaved_1f1b needs at least 2 chunks per rank.",
             "parallel.schedule=1f1b"],
        ),
        (
            "parallel=3d parallel.schedule=1f2b",
            ["parallel.schedule=1f2b must be one of gpipe, 1f1b,", "Did you mean 1f1b?"],
        ),
        ("parallel=3d parallel.context=rng", ["parallel.context=rng: expected ring or ulysses", "Did you mean ring?"]),
        ("parallel=3d gradients=bf15", ["gradients=bf15 is not available here", "Did you mean gradients=bf16?"]),
        ("parallel=single gradients=bf16", ["gradients=bf16 has no effect with parallel=single.", "gradients=sum, or"]),
        ("parallel=fsdp parallel.zero=4", ["parallel.zero=4: expected 0 or 1 or 2 or 3"]),
        (
            "parallel=pp parallel.overlap=true",
            ["parallel.overlap=true: parallel.schedule=1f1b does not overlap forwards with backwards.",
             "parallel.schedule=dualpipe_v"],
        ),
        ("parallel=fsdp parallel.prefetch=-1", ["parallel.prefetch=-1 must be at least 0."]),
        ("parallel=3d parallel.tp=0", ["parallel.tp=0 must be at least 1."]),
        (
            "parallel=3d parallel.topology.gpus_per_node=0",
            ["parallel.topology.gpus_per_node=0 must be at least 1."],
        ),
        ("parallel=3d parallel.tp=2 launch.processes=5", ["tp 2 does not fit 5 processes.", "launch.processes=4"]),
        ("parallel=3d launch.processes=12", ["batch.global_size=16 is not divisible by 3 data-parallel ranks."]),
        ("parallel=3d parallel.tpp=2", ["there is no option parallel.tpp.", "Did you mean parallel.tp?"]),
        (
            "parallel=tp launch.processes=4 parallel.zero=9 parallel.context=x parallel.tp=4",
            ["2 problems:", "1. parallel.zero=9", "2. parallel.context=x"],
        ),
        (
            "parallel=3d launch.processes=16 parallel.tp=4 parallel.pp=4 batch.sequence_length=126 "
            "parallel.schedule=zb_v",
            ["3 problems:", "parallel.tp=4 does not divide", "sequence_length=126", "parallel.pp=4 with 2"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_invalid_layout_is_refused_with_a_fix(train, words, lines):
    message = train(words)
    for line in lines:
        assert line in message


def test_indivisible_sequence_length_error_suggests_nearest_lengths(train):
    assert train("parallel=3d parallel.pp=1 parallel.cp=2 batch.sequence_length=126") == (
        "batch.sequence_length=126 does not divide over cp 2 x tp 2 (sequence parallelism).\n"
        "  The sequence length must be a multiple of 4. "
        "Ring attention gives each rank an early and a late chunk, so that all ranks have equal work.\n"
        "  Nearest: batch.sequence_length=124 or batch.sequence_length=128"
    )


def test_invalid_model_reports_no_layout_errors(train):
    message = train("parallel=3d model.heads=7")
    assert message.startswith("2 problems:")  # heads do not divide dim, and kv_heads do not divide heads
    assert "parallel" not in message


# --- accepted layouts ---


def problems(config, processes: int, **given) -> list[Problem]:
    return config.check(build_default_run(parallel=config, launch=LocalLaunch(processes=processes), **given))


@pytest.mark.parametrize("config", [ThreeD(), Fsdp(), Hsdp(), Tp(), Pp()], ids=lambda config: type(config).__name__)
def test_the_defaults_fit_the_default_model(config):
    assert problems(config, config.count_ranks(0)) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_accepted(schedule):
    assert problems(Pp(schedule=schedule), 2) == []


def test_key_head_shared_by_several_ranks_is_accepted():
    sizes = {"heads": 8, "kv_heads": 2, "dim": 256, "ffn_dim": 512, "layers": 4, "vocab_size": 250}
    assert problems(Tp(), 8, model=decoder(**sizes)) == []


def decoder(**sizes):
    from gangline_basics.model.config import DecoderConfig

    return DecoderConfig(**sizes)


def test_tp_wider_than_node_needs_force():
    model = decoder(heads=16, kv_heads=16, dim=256, ffn_dim=512, layers=4)
    assert problems(Tp(), 16, model=model)
    assert problems(Tp(force=True), 16, model=model) == []
    wide = Tp()
    wide.topology.gpus_per_node = 16
    assert problems(wide, 16, model=model) == []


def test_vocabulary_smaller_than_tp_is_refused():
    (found,) = problems(Tp(), 4, model=decoder(heads=4, dim=128, ffn_dim=512, layers=4, vocab_size=3))
    assert found.what == "parallel.tp=4 does not divide model.vocab_size=3."
    assert found.fix.startswith("parallel.tp=2; or parallel.tp=1")


def test_uneven_vocabulary_and_sequence_length_are_accepted():
    model = decoder(heads=4, dim=128, ffn_dim=512, layers=4, vocab_size=257)
    assert problems(Tp(sequence_parallel=False), 4, model=model, batch={"sequence_length": 127}) == []


# --- plans ---


def of_plan(change, config=None, **axes) -> list[str]:
    """Return the problems of the default model's plan after `change`."""
    run = build_default_run(parallel=config or ThreeD())
    tree, plan = compose_model(run)
    return [problem.what for problem in fits.find_problems(run.parallel, run, Mesh.of(axes), tree, change(plan))]


def replaced(**changes):
    from dataclasses import replace

    return lambda plan: replace(plan, **changes)


def test_shard_rule_without_matching_parameter_is_refused():
    more = lambda plan: plan.extend(sharding=(ShardRule.colwise("blocks.*.attention.wx"),))  # noqa: E731
    assert of_plan(more) == [
        "the plan of this model shards blocks.*.attention.wx, which matches no parameter of the model."
    ]


def test_tp_refuses_a_plan_without_shard_rules():
    unsharded = replaced(sharding=())
    assert of_plan(unsharded, tp=2) == [
        "parallel.tp=2: the plan of this model has no shard rule for tensor parallelism."
    ]
    assert of_plan(unsharded, pp=2, dp_shard=2) == []


def test_cp_and_tp_refuse_plan_without_seams():
    (one,) = of_plan(replaced(seams=()), cp=2)
    assert one == "parallel.cp=2: the plan of this model has no attention seam."
    (other,) = of_plan(replaced(seams=()), tp=2)
    assert other == "parallel.tp=2: the plan shards head.weight over tp, and has no loss seam."


def test_plan_without_facts_is_checked_by_parameter_shapes():
    (found,) = of_plan(replaced(facts={}), tp=4)
    assert found.startswith("parallel.tp=4 does not divide blocks.*.attention.wq=6")


@pytest.mark.parametrize(
    ("fold", "axes", "fits_it"),
    [
        (Fold("x", 2, ("dp_shard",)), {"dp_shard": 4}, True),
        (Fold("x", 3, ("dp_shard",)), {"dp_shard": 4}, False),
        (Fold("x", 8, ("dp_shard",)), {"dp_shard": 4}, False),
        (Fold("x", 8, ("dp_shard",)), {"tp": 2}, True),  # dp_shard has one rank: the module is not sharded
        (Fold("x", 4, ("dp_shard", "tp")), {"dp_shard": 4, "tp": 2}, True),
        (Fold("x", 6, ("dp_replicate", "dp_shard")), {"dp_replicate": 3, "dp_shard": 4}, True),
        (Fold("x", 8, ("dp_replicate", "dp_shard")), {"dp_replicate": 3, "dp_shard": 4}, False),
    ],
    ids=str,
)
def test_fold_size_must_divide_its_axes(fold, axes, fits_it):
    found = of_plan(lambda plan: with_fold(plan, fold), **axes)
    assert found == [] if fits_it else found[0].startswith(f"x={fold.size} does not divide the ranks of")


def with_fold(plan: Plan, fold: Fold) -> Plan:
    return plan.extend(folds=(fold,))


def test_fold_over_tp_ranks_needs_sequence_parallelism():
    fold = Fold("x", 2, ("tp",))
    assert of_plan(lambda plan: with_fold(plan, fold), tp=2) == []
    (found,) = of_plan(lambda plan: with_fold(plan, fold), ThreeD(sequence_parallel=False), tp=2)
    assert found == "x uses ranks of tp, which needs parallel.sequence_parallel=true."
