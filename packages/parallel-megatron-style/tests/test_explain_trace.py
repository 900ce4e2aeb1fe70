"""`gangline parallel explain --trace`: peak memory traced on the meta device, against the closed forms."""

from __future__ import annotations

import re
from itertools import product

import pytest

from gangline.config.compose import compose_one
from gangline_parallel_megatron_style.commands import main
from gangline_parallel_megatron_style.explain.of_run import explain_run, make_case
from gangline_parallel_megatron_style.explain.trace import trace

SHAPE = ("model=llama3-8b", "model.layers=4", "precision=bf16", "batch.micro_size=1", "batch.sequence_length=4096")
PIPELINE = ("parallel=3d", "parallel.tp=8", "parallel.pp=2", "parallel.dp_shard=4", "launch.processes=64")


@pytest.mark.parametrize(
    ("words", "within"),
    [
        ((*PIPELINE, "batch.global_size=16"), 0.03),
        ((*PIPELINE, "batch.global_size=16", "run.recompute=full"), 0.03),
        (("parallel=fsdp", "launch.processes=8", "batch.global_size=16"), 0.02),
        (("parallel=fsdp", "parallel.zero=1", "launch.processes=8", "batch.global_size=16"), 0.02),
        ((*PIPELINE, "batch.global_size=16", "callback=ema", "callback.ema.decays=[0.9,0.99,0.999]"), 0.03),
        (("parallel=fsdp", "model.tied=true", "launch.processes=8", "batch.global_size=16"), 0.02),
        (("parallel=fsdp", "model.tied=true", "parallel.zero=1", "launch.processes=8", "batch.global_size=16"), 0.02),
    ],
    ids=["3d", "recomputed", "fsdp", "zero=1", "averages", "tied", "tied, zero=1"],
)
def test_traced_peak_matches_closed_form(words, within, capsys):
    assert main(["explain", "--trace", *SHAPE, *words]) == 0
    said = capsys.readouterr().out
    ratio = re.search(r"([\d.]+) x the total above", said)
    assert ratio is not None, said
    assert abs(float(ratio[1]) - 1) <= within, said


WIDE = ("parallel=3d", *SHAPE, "model.layers=2")
SMALL = [  # tp, pp, dp, zero, microbatches, tied
    (2, 1, 4, 0, 1, False),  # the logits are in memory while the head's weight gradient is computed
    (2, 1, 4, 2, 3, False),  # that gradient is in memory in two dtypes, next to its accumulated sum
    (2, 1, 4, 3, 1, True),
    (2, 1, 4, 2, 3, True),
    (1, 1, 8, 3, 1, False),  # one microbatch: blocks have no accumulated sums yet
    (1, 2, 4, 0, 1, True),  # the copy of a tied weight has no optimizer state
    (2, 2, 2, 2, 6, True),
]
ALL = product((1, 2), (1, 2), (2, 4), (0, 1, 2, 3), (1, 3), (False, True))
MORE = [pytest.param(*case, marks=pytest.mark.nightly) for case in ALL if case not in SMALL]


@pytest.mark.parametrize(("tp", "pp", "dp", "zero", "microbatches", "tied"), [*SMALL, *MORE])
def test_traced_peak_of_each_rank_matches_explain(tp, pp, dp, zero, microbatches, tied):
    axes = f"parallel.tp={tp} parallel.pp={pp} parallel.dp_shard={dp} launch.processes={tp * pp * dp}"
    words = f"{axes} parallel.zero={zero} batch.global_size={dp * microbatches} model.tied={str(tied).lower()}"
    run = compose_one([*WIDE, *words.split()])
    for rank, told in {rank: explain_run(run).ranks[rank].memory for rank in {0, pp - 1}}.items():
        assert trace(run, make_case(run), rank).peak == pytest.approx(told, rel=0.03)
