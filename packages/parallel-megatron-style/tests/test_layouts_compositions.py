"""Layout invariance of compositions of all axes: losses, gradients, norms and weights of one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from layout_ranks import Composition as C, Layouts

from gangline_testkit.scenarios import FLOAT32

SELECTIVE, FULL = "run.recompute=selective", "run.recompute=full"
TWO_EACH = "batch.global_size=16 batch.micro_size=2"
ONE_EACH = "batch.global_size=4 batch.micro_size=2"  # one microbatch on each of two data ranks
TRAINED = {"steps": 20, "bound": 1e-10}  # rounding errors grow over twenty steps

WINDOWS = "window=5 full_every=3 attention_scale=0.3 z_loss=0.01"  # every strategy supports these
SEAMS = f"{WINDOWS} soft_cap=1.5 sinks=true"  # ring attention refuses soft cap and sinks

ON_FOUR = (
    C("pp=2 tp=2", f"layers=3 {SEAMS}", TWO_EACH, batches="documents"),
    C("tp=2 dp_shard=2 zero=1 sequence_parallel=false", f"tied=true {SEAMS}"),
    C("pp=2 dp_shard=2 zero=3 schedule=interleaved_1f1b", "layers=5", FULL),
    C("dp_shard=2 cp=2 zero=2 context=ulysses", f"layers=3 {SEAMS}", TWO_EACH),
    C("tp=4 sequence_parallel=false", "kv_heads=1 vocab_size=9", SELECTIVE),
    C("dp_replicate=2 dp_shard=2 zero=2", lanes=4, out_of=("dp_replicate", "dp_shard")),
    C("dp_shard=2 tp=2 zero=3", "tied=true qk_norm=false", FULL, lanes=4, out_of=("dp_shard", "tp")),
    C("pp=4 schedule=zb_h1 stages=[1,2,2,1]", "layers=6 tied=true"),
    C("cp=4 zero=1", f"layers=3 {WINDOWS}", FULL),
    C("pp=2 dp_replicate=2 schedule=dualpipe_v", "layers=4 tied=true", lanes=2),
)
ON_EIGHT = (
    C("pp=2 cp=2 tp=2 zero=3", f"layers=3 kv_heads=1 {WINDOWS}", SELECTIVE, batches="documents"),
    C("dp_shard=2 cp=2 tp=2 zero=3 context=ulysses", f"tied=true {SEAMS}", TWO_EACH),
    C("pp=2 tp=4 schedule=dualpipe_v sequence_parallel=false", "layers=4 tied=true", SELECTIVE),
    C("pp=2 dp_replicate=2 dp_shard=2 zero=3 schedule=zb_v", "layers=4", lanes=2),
    C("dp_replicate=2 dp_shard=2 tp=2 zero=2", "", "batch.global_size=4", lanes=2, out_of=("dp_shard", "tp")),
    C("pp=2 dp_shard=2 cp=2 zero=2 schedule=interleaved_1f1b", "layers=4", dtype=torch.float32, bound=FLOAT32),
)
NIGHTLY = (
    C("tp=2 dp_shard=2 zero=3", "layers=3 tied=true qk_norm=false", TWO_EACH),
    C("cp=2 tp=2 zero=3", f"kv_heads=1 {WINDOWS}", batches="documents"),
    C("pp=2 cp=2 zero=2", "tied=true layers=3", batches="documents"),
    C("pp=2 dp_shard=2 tp=2", "tied=true", steps=8, bound=1e-10),
    C("pp=4 tp=2 schedule=zb_h1 stages=[2,1,1,1]", "layers=5 tied=true kv_heads=1", FULL),
    C("pp=4 dp_shard=2 zero=3 schedule=gpipe", "layers=4", TWO_EACH),
    C("pp=4 cp=2 schedule=interleaved_1f1b", "layers=8", batches="documents"),
    C("pp=2 tp=4 schedule=zb_v", "layers=4"),
    C("pp=2 dp_shard=2 tp=2 zero=3 schedule=zb_v", "layers=5 kv_heads=1", TWO_EACH, batches="documents"),
    C("pp=2 dp_shard=2 tp=2 zero=2 schedule=zb_h1 sequence_parallel=false", "tied=true", FULL),
    C("pp=2 dp_shard=2 tp=2 zero=0 schedule=interleaved_1f1b", "layers=4", lanes=2, out_of=("dp_shard", "tp")),
    C("pp=2 dp_shard=2 tp=2 zero=3 schedule=dualpipe_v", "layers=4", SELECTIVE, lanes=4, out_of=("dp_shard", "tp")),
    C("pp=2 cp=2 tp=2 zero=1 context=ulysses schedule=zb_h1", "layers=3 tied=true", batches="documents"),
    C("pp=2 cp=4 zero=3", "layers=3", FULL),
    C("pp=4 tp=2 schedule=zb_v", f"layers=8 {SEAMS}", SELECTIVE),
    C("pp=2 cp=2 tp=2 context=ulysses sequence_parallel=false", f"layers=3 {SEAMS}", batches="documents"),
    C("cp=4 tp=2 zero=2", "kv_heads=1 tied=true", batches="documents"),
    C("cp=2 tp=4 zero=3 sequence_parallel=false", "", SELECTIVE),
    C("dp_shard=4 tp=2 zero=3", "vocab_size=7 tied=true", lanes=8 // 2, out_of=("dp_shard", "tp")),
    C("dp_shard=2 cp=4 zero=3", "kv_heads=1", TWO_EACH, lanes=2),
    C("dp_replicate=2 cp=2 tp=2 context=ulysses", "tied=true", lanes=2, out_of=("dp_replicate",)),
    C("dp_replicate=4 dp_shard=2 zero=1", "tied=true", lanes=4, out_of=("dp_replicate", "dp_shard")),
    C("dp_replicate=2 dp_shard=4 zero=3", "", "batch.global_size=16", lanes=2),
    C("dp_replicate=2 dp_shard=2 cp=2 zero=3", "", SELECTIVE, batches="documents"),
    C("pp=2 dp_replicate=2 tp=2 zero=0 schedule=gpipe", "layers=3", ONE_EACH),
    C("pp=2 dp_shard=4 zero=2 schedule=1f1b", "layers=3 tied=true", lanes=4),
    C("pp=2 dp_shard=2 tp=2 zero=3", "layers=3 tied=true", batches="documents", **TRAINED),
    C("dp_shard=2 cp=2 tp=2 zero=3", "kv_heads=1", **TRAINED),
    C("pp=4 tp=2", "layers=4", dtype=torch.float32, bound=FLOAT32),
    C("dp_shard=2 cp=2 tp=2 zero=2", "tied=true", dtype=torch.float32, bound=FLOAT32),
)

EXACT = {"dtype": torch.float32, "bound": 0, "steps": 3, "deterministic": True}
SAME_BITS = (
    C("pp=2 dp_shard=2 zero=3 schedule=zb_v", "layers=4", **EXACT),
    C("pp=2 dp_replicate=2 schedule=interleaved_1f1b", "layers=4", TWO_EACH, **EXACT),
    C("pp=4 zero=0 schedule=zb_h1 stages=[1,2,2,1]", "layers=6", **EXACT),
    C("pp=2 dp_replicate=2 dp_shard=2 zero=2", "layers=3", FULL, **EXACT),
)
SAME_BITS_NIGHTLY = tuple(
    C(f"pp=2 dp_shard=2 zero={zero} schedule={schedule}", "layers=4", batches=batches, **EXACT)
    for zero, schedule, batches in (
        (0, "gpipe", "documents"),
        (1, "1f1b", "ragged"),
        (2, "interleaved_1f1b", "documents"),
        (3, "zb_h1", "ragged"),
        (2, "dualpipe_v", "ragged"),
    )
) + (
    C("pp=4 dp_shard=2 zero=3 schedule=zb_h1", "layers=5", **EXACT),
    C("pp=2 dp_replicate=4 schedule=zb_v", "layers=4", **EXACT),
    C("pp=4 dp_replicate=2 schedule=dualpipe_v", "layers=8", **EXACT),
    C("dp_replicate=2 dp_shard=4 zero=3", "tied=true", **EXACT),
)


@pytest.mark.parametrize("composition", [*ON_FOUR, *ON_EIGHT], ids=str)
def test_composition_matches_one_process(composition):
    Layouts().holds(composition)


@pytest.mark.nightly
@pytest.mark.parametrize("composition", NIGHTLY, ids=str)
def test_nightly_composition_matches_one_process(composition):
    Layouts().holds(composition)


@pytest.mark.parametrize("composition", SAME_BITS, ids=str)
def test_batch_and_stage_splits_are_bit_identical(composition):
    Layouts().holds(composition)


@pytest.mark.nightly
@pytest.mark.parametrize("composition", SAME_BITS_NIGHTLY, ids=str)
def test_nightly_batch_and_stage_splits_are_bit_identical(composition):
    Layouts().holds(composition)


# --- two runs of one layout ---

TWICE = (  # default: cp, because the suite (`test_conformance_sharding`) runs all other axes twice
    pytest.param(C("pp=2 dp_shard=2 tp=2 zero=3", "tied=true", deterministic=True), marks=pytest.mark.nightly),
    C("dp_shard=2 cp=2 zero=2", "", FULL, batches="documents", deterministic=True),
)


@pytest.mark.parametrize("composition", TWICE, ids=str)
def test_two_runs_of_composition_are_bit_identical(composition):
    Layouts().same_twice(composition)


# --- non-finite values ---


@pytest.mark.parametrize(  # the corners 1 and 6 of the mesh have each coordinate of each axis
    "culprits", [(1, 6), pytest.param((0, 2, 3, 4, 5, 7), marks=pytest.mark.nightly)], ids=str
)
@pytest.mark.parametrize(  # in a pipeline, a rank lacks other stages' losses; the suite tests layouts without pp
    "on", ["pp=2 dp_shard=2 tp=2 zero=3", pytest.param("dp_shard=2 cp=2 tp=2 zero=1", marks=pytest.mark.nightly)]
)
def test_non_finite_rank_is_known_to_all_ranks(on, culprits):
    Layouts().any_rank_stops_all(C(on, steps=1), culprits)


# --- random compositions ---


@st.composite
def compositions(draw):
    """Draw a composition of 2, 4 or 8 ranks, which `train` may refuse."""
    sizes = draw(st.sampled_from([(2, 1, 1, 1, 1), (4, 1, 1, 1, 1), (2, 2, 1, 1, 1), (4, 2, 1, 1, 1), (2, 2, 2, 1, 1)]))
    axes = dict(zip(("pp", "dp_replicate", "dp_shard", "cp", "tp"), draw(st.permutations(sizes)), strict=True))
    options = {
        **axes,
        "zero": draw(st.integers(0, 3)),
        "schedule": draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"])),
        "context": draw(st.sampled_from(["ring", "ulysses"])),
        "sequence_parallel": draw(st.sampled_from(["true", "false"])),
    }
    lanes, out_of = draw(st.sampled_from([0, 0, 2, 4])), ()
    if lanes:
        out_of = draw(st.sampled_from([("dp_shard",), ("dp_replicate", "dp_shard"), ("dp_shard", "tp")]))
    model = {
        "layers": draw(st.integers(1, 8)),
        "dim": 32,
        "heads": (heads := draw(st.sampled_from([2, 4, 8]))),
        "kv_heads": draw(st.sampled_from([number for number in (1, 2, 4, 8) if number <= heads])),
        "ffn_dim": draw(st.sampled_from([8, 20, 36, 48])),
        "vocab_size": draw(st.integers(5, 70)),
        "tied": draw(st.sampled_from(["true", "false"])),
        "qk_norm": draw(st.sampled_from(["true", "false"])),
        "window": draw(st.sampled_from(["null", "2", "3", "9"])),  # a window of 1: gradients are only rounding errors
        "soft_cap": draw(st.sampled_from(["null", "null", "1.5"])),
        "sinks": draw(st.sampled_from(["false", "false", "true"])),
        "z_loss": draw(st.sampled_from([0.0, 0.01])),
    }
    run = {
        "batch.global_size": 16,
        "batch.sequence_length": draw(st.sampled_from([8, 12, 16, 24])),
        "batch.micro_size": draw(st.sampled_from([1, 2])),
        "run.recompute": draw(st.sampled_from(["none", "selective", "full"])),
    }
    return C(
        words(options),
        words(model),
        words(run),
        batches=draw(st.sampled_from(["ragged", "documents"])),
        lanes=lanes,
        out_of=out_of,
        steps=1,
    )


def words(options):
    return " ".join(f"{name}={value}" for name, value in options.items())


@pytest.mark.nightly
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(compositions())
def test_every_accepted_composition_is_layout_invariant(composition):
    suite = Layouts()
    assume(not suite.problems(composition))
    suite.holds(composition)
