"""A rank's real operators on the meta device, against the closed forms."""

from __future__ import annotations

import re

import pytest

from gangline_parallel_megatron_style.commands import main

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
def test_the_closed_forms_tell_the_peak(words, within, capsys):
    assert main(["explain", "--trace", *SHAPE, *words]) == 0
    said = capsys.readouterr().out
    ratio = re.search(r"([\d.]+) x the sum above", said)
    assert ratio is not None, said
    assert abs(float(ratio[1]) - 1) <= within, said
