"""Text generation under several layouts, equal to the text of one process."""

from __future__ import annotations

import pytest
import write_ranks

from gangline.runtime import Sampling
from gangline_testkit.pool import get_pool
from gangline_testkit.runs import build_small_run

MODEL = ("model.vocab_size=51", "model.layers=4", "model.heads=4", "model.kv_heads=2", "model.init_std=0.4")
SETTINGS = (*MODEL, "batch.sequence_length=16", "batch.global_size=8", "precision=fp64", "parallel=3d")
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
LAYOUTS = {
    "tp=2": 2,
    "tp=2 sequence_parallel=false": 2,
    "pp=2": 2,
    "pp=2 schedule=zb_v": 2,
    "cp=2": 2,
    "cp=2 context=ulysses": 2,
    "dp_shard=2 zero=3": 2,
    "pp=2 tp=2": 4,
}


def written(on: str, world: int, *more: str, how: Sampling):
    run = build_small_run(*SETTINGS, *(f"parallel.{word}" for word in on.split()), *more)
    found = get_pool(world).run(write_ranks.texts, run, PROMPTS, how)
    assert all(texts == found[0][0] for texts, _ in found), "the ranks say different things"
    assert all(change == 0 for _, change in found), "writing changed what is computed afterwards"
    return found[0][0]


WINDOWED = ("model.window=4", "model.sinks=true", "model.tied=false")
# ring attention does not support sinks
CASES = [(on, more) for on in LAYOUTS for more in ((), WINDOWED) if not ("cp=2" in on and more)]


@pytest.mark.parametrize(("on", "more"), CASES, ids=[f"{on}-{'window' if more else 'plain'}" for on, more in CASES])
def test_generated_text_matches_one_process(on, more):
    how = Sampling(tokens=9, temperature=0.9, top_p=0.95, seed=2)
    alone = written("tp=1", 1, *more, how=how)
    assert len({tuple(one.tokens) for one in alone}) == len(PROMPTS)
    assert written(on, LAYOUTS[on], *more, how=how) == alone
    if on == "tp=2":
        run = build_small_run(*SETTINGS[:-1], *more, "parallel=ddp")
        assert get_pool(2).run(write_ranks.texts, run, PROMPTS, how)[0][0] == alone
