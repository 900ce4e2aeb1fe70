"""Layout invariance of model families: results of one process for any combination of axes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import write_ranks

from gangline import UserError
from gangline.config import Run
from gangline.config.serial import from_dict
from gangline.runtime import Sampling
from gangline_testkit import StrategySuite
from gangline_testkit.pool import get_pool
from gangline_testkit.runs import SMALL, parse_settings
from gangline_testkit.scenarios import FLOAT64, RunLayout, Scenario
from gangline_testkit.strategy_ranks import StrategyJob

SIZES = ("model.init_std=0.15", "model.layers=4", "batch.sequence_length=16")
# Messages take most of a test's time. Without pipeline stages, two layers cover all kinds of layers.
SHORT = ("model.layers=2", "batch.global_size=4", "batch.micro_size=2")
FEWER = "model.kv_heads=2"
# family -> options besides sizes, so that each feature that the decoder of basics lacks affects the results
FAMILIES = {
    "qwen2": (FEWER, "model/rope=yarn", "model.rope.original_max_position=8"),
    "ministral": (FEWER, "model.window=5", "model.full_every=2"),
    "olmo2": (FEWER,),
    "olmo3": (FEWER, "model.window=5", "model.full_every=2"),
    "smollm3": (FEWER, "model.nope_every=2"),
    "phi3": (FEWER, "model.head_dim=8", "model.rotary_share=0.5", "model.window=7"),
    "granite": (FEWER, "model.logits_scaling=1.5"),
    "gemma2": (FEWER, "model.soft_cap=2", "model.logit_soft_cap=3", "model.window=5", "model.z_loss=0.01"),
    "gemma3": (FEWER, "model.window=5", "model.full_every=2"),
    "gpt2": ("model.positions=16",),
    "gpt_oss": (FEWER, "model.window=5", "model.limit=0.5", "moe=on", "moe/router=biased", "run.deterministic=false"),
    "deepseek_v3": (
        *("model.kv_rank=6", "model.q_rank=5", "model.nope_dim=6", "model.rope_dim=4", "model.v_dim=6"),
        *("moe=on", "moe/router=grouped", "moe.experts=8", "moe.router.groups=4", "moe.router.top_groups=2"),
        *("moe.shared=1", "moe.first=1", "run.deterministic=false"),
    ),
    "qwen3_next": (
        *(FEWER, "model.head_dim=8", "model.rotary_share=0.5", "model.full_every=2", "model.delta_key_heads=2"),
        *("model.delta_heads=4", "model.delta_key_dim=4", "model.delta_value_dim=5"),
        *("moe=on", "moe/router=softmax", "moe.shared=1", "moe.shared_gate=true", "run.deterministic=false"),
    ),
}
NO_CP = ("qwen3_next",)  # a layer has a recurrent state, which passes from token to token
RING_LACKS = {"gemma2": "soft cap", "gpt_oss": "sinks"}


class Layouts(StrategySuite):
    """Methods of the strategy suite, with the model of a family instead of the toy."""

    choice = "parallel=3d"
    family = ""

    def run(self, *settings: str) -> Run:
        plain = [word for word in SMALL if not word.startswith(("model=", "model.kv_heads", "model.qk_norm"))]
        own = (f"model={self.family}", *SIZES, *FAMILIES[self.family], self.choice)
        return from_dict(parse_settings([*plain, *own, *settings]))

    def make_job(self, layout: RunLayout, scenario: Scenario) -> StrategyJob:
        job = super().make_job(layout, scenario)
        # Without rotary positions, a key bias adds the same value to all scores of a query. Its exact gradient is 0;
        # the computed one consists of rounding errors, to which no relative bound applies.
        frozen = ("blocks.*.attention.wk.bias",) if getattr(job.run.model, "biases", False) else ()
        return replace(job, plan=replace(job.plan, frozen=frozen))


def holds(family: str, on: str, *settings: str) -> None:
    """Compare loss, gradients, norm, weights and evaluation with one process. on: for example "pp=2 tp=2 zero=3"."""
    suite = Layouts()
    suite.family = family
    layout, scenario = RunLayout.from_words(on), Scenario(settings, batches="documents", steps=2)
    job = suite.make_job(layout, scenario)
    problems = [*job.run.parallel.check(job.run), *job.run.model.check(job.run)]
    assert not problems, "\n".join(map(str, problems))
    suite.compare(layout, scenario, FLOAT64)


def allowed(family: str, on: str) -> str:
    """Return `on`, with `context=ulysses` added if ring attention does not support the family.

    In this case, first check that `on` is refused and that the message names the missing feature.
    """
    if "cp" not in on or "ulysses" in on or family not in RING_LACKS:
        return on
    suite = Layouts()
    suite.family = family
    run = suite.make_job(RunLayout.from_words(on), Scenario()).run
    assert any(RING_LACKS[family] in str(problem) for problem in run.parallel.check(run))
    return f"{on} context=ulysses"


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_layout_invariant(family):
    """Split heads, weights and, if supported, tokens in one run of four processes."""
    holds(family, "dp_shard=2 tp=2 zero=3" if family in NO_CP else allowed(family, "cp=2 tp=2 zero=3"), *SHORT)


@pytest.mark.parametrize("family", NO_CP)
@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_families_without_context_parallelism_refuse_cp(family, context):
    suite = Layouts()
    suite.family = family
    run = suite.make_job(RunLayout.from_words(f"cp=2 context={context}"), Scenario()).run
    assert any("blocks.0.attention" in str(problem) for problem in run.parallel.check(run))


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss", "deepseek_v3"])
def test_pipeline_stages_do_not_change_results(family):
    """Run the families that have their own first and last modules."""
    holds(family, "tp=2 pp=2", "batch.global_size=4", "batch.micro_size=1")


def test_gpt2_without_biases_is_layout_invariant():
    holds("gpt2", "cp=2 tp=2 zero=3", "model.biases=false", "model.gelu=exact", *SHORT)


def test_family_with_experts_is_layout_invariant():
    holds("olmo2", "dp_shard=2 tp=2 zero=3", "moe=on", "moe.ep=2", "run.deterministic=false", *SHORT)


def test_experts_with_unsupported_activation_are_refused():
    suite = Layouts()
    suite.family = "gemma3"
    with pytest.raises(UserError, match="moe does not support feed-forwards with gelu_tanh"):
        suite.make_job(RunLayout.from_words("tp=1"), Scenario(("moe=on",)))


@pytest.mark.parametrize(
    ("family", "on"),
    [
        ("deepseek_v3", "tp=2"),
        ("deepseek_v3", "tp=2 sequence_parallel=false"),
        ("deepseek_v3", "pp=2"),
        ("qwen3_next", "tp=2"),
        ("qwen3_next", "pp=2"),
        ("qwen3_next", "dp_shard=2 zero=3"),
    ],
)
def test_generated_text_matches_one_process(family, on):
    """Check decoding caches: a rank caches its own heads, and each rank caches the full key that all heads share."""
    suite = Layouts()
    suite.family = family
    prompts, how = [[3, 1, 4, 1, 5], [9, 2, 6]], Sampling(tokens=8)
    settings = ("model.init_std=0.4", "precision=fp64")
    alone = get_pool(1).run(write_ranks.texts, suite.run(*settings), prompts, how)[0][0]
    assert len({token for one in alone for token in one.tokens}) > 4
    cut = suite.run(*settings, *(f"parallel.{word}" for word in on.split()))
    assert get_pool(2).run(write_ranks.texts, cut, prompts, how) == [(alone, 0.0)] * 2


# layout -> whether it also runs with run.recompute=full: once each with sharded weights, stages and sharded tokens
MORE = {
    "tp=2": False,
    "cp=2": False,
    "tp=2 pp=2": False,
    "dp_shard=2 tp=2 zero=3": True,
    "tp=2 sequence_parallel=false": False,
    "pp=2 schedule=zb_h1 tp=2": False,
    "pp=2 dp_shard=2 schedule=dualpipe_v zero=3": True,
    "cp=2 tp=2 context=ulysses": True,
    "dp_shard=4 zero=2": False,
    "pp=2 tp=2 dp_shard=2": False,
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "on"),
    [(family, on) for family in FAMILIES for on in MORE if family not in NO_CP or "cp" not in on],  # refused above
)
def test_more_layouts_do_not_change_results(family, on):
    named = allowed(family, on)
    many = ("batch.global_size=16", "batch.micro_size=1") if "pp" in on else ()
    holds(family, named, *many)
    if MORE[on]:
        holds(family, named, "run.recompute=full", *many)
