"""Suggested fixes of error messages: the first and the last suggestion of many messages solve the problem."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from gangline.config.check import find_problems
from gangline.config.compose import compose_one

MISTAKES = """\
parallel=pp launch.processes=5
parallel=pp launch.processes=4 parallel.schedule=interleaved_1f1b
parallel=pp launch.processes=2 parallel.schedule=interleaved_1f1b parallel.chunks=4
parallel=pp launch.processes=4 parallel.schedule=zb_v
parallel=pp parallel.stages=[3,2]
parallel=pp parallel.chunks=3
parallel=pp parallel.schedule=interleaved_1f1b parallel.chunks=1
parallel=pp parallel.overlap=true
parallel=ddp launch.processes=3
parallel=ddp launch.processes=4 batch.global_size=2
parallel=fsdp launch.processes=3
parallel=hsdp launch.processes=6
parallel=3d launch.processes=7
parallel=3d launch.processes=12
parallel=3d parallel.tp=4
parallel=3d parallel.tp=3
parallel=3d parallel.tp=2 launch.processes=5
parallel=3d parallel.cp=3 launch.processes=3
parallel=tp launch.processes=4
parallel=tp launch.processes=16
parallel=fsdp parallel.cp=2 parallel.context=ulysses launch.processes=2 model.heads=3 model.kv_heads=3 model.dim=48
parallel=fsdp parallel.cp=2 batch.sequence_length=126 launch.processes=2
parallel=single parallel.groups=3
launch.processes=8
run.device=gpu
batch.micro_size=3
batch.global_size=10 batch.micro_size=4
model.dim=100
model.heads=5
model.kv_heads=5
model.head_dim=15
model.vocab_size=100
model.norm_eps=-1
model.rope_scaling_factor=2 model.rope_low_freq_factor=4
optimizer.learning_rate=nan optimizer.clip_norm=-1 optimizer.betas=[0.9,1]
schedule.warmup_steps=400
schedule=wsd schedule.decay_steps=299
precision=fp16 precision.initial_scale=0.5
data.validation_fraction=0
data.path=nowhere
checkpoint.every=auto
moe=on moe.ep=3
moe=on moe.ep=2
moe=on moe.top_k=9
moe=on moe.first=4
moe=on moe/router=grouped moe.router.groups=3
moe=on moe.experts=6 parallel=fsdp launch.processes=4 moe.ep=4
moe=on moe/router=expert_choice moe.router.global_aux_loss=0.1
checkpoint=zarr checkpoint.durable_every=5""".splitlines()


def advised(fix: str) -> Iterator[list[str]]:
    """Yield the overrides of each fix that a message suggests, as in `a=1 b=2; or c=3` or `Choose d among 1, 2`."""
    for path, first, last in re.findall(r"([a-z]\w*(?:\.\w+)+) (?:among|from) (\d+) to (\d+)", fix):
        yield from ([f"{path}={value}"] for value in range(int(first), int(last) + 1))
    for path, values in re.findall(r"([a-z]\w*(?:\.\w+)+) among ([\d, ]+)(?! to)", fix):
        yield from ([f"{path}={value.strip()}"] for value in values.split(",") if value.strip())
    for way in re.split(r";|,? or ", fix):
        if words := re.findall(r"(?<![\w.])[a-z]\w*(?:[./]\w+)*=[^\s;]+", way):
            yield [word.rstrip(".,:") for word in words]


def wrong(words: list[str]) -> set[str]:
    return {problem.what for problem in find_problems(compose_one(words))}


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["ends", "more"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_suggested_fixes_solve_the_problem(mistake, more, monkeypatch):
    """Apply the first and the last suggested fix; more: the second one and one from the middle."""
    monkeypatch.setattr("gangline.config.check.count_gpus", lambda: 0)
    words = mistake.split()
    found = find_problems(compose_one(words))
    before = {problem.what for problem in found}
    for problem in found:
        ways = list(advised(problem.fix or problem.why.rpartition("\n")[2]))  # the last line suggests a fix
        assert ways or "validation" in mistake, f"{problem.what} offers no way out: {problem.fix}"
        tried = (*ways[1:2], *ways[len(ways) // 2 :][:1]) if more else (*ways[:1], *ways[-1:])
        for way in {str(way): way for way in tried}.values():
            left = wrong([*words, *way])
            assert left < before, f"{problem.what} advises {' '.join(way)}: {left}"
