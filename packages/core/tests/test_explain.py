"""`explain` of `single` and `ddp`, and the timeline of any `Explained`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from gangline.config.compose import compose_one
from gangline.explain.explained import StepAction
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.model.flops import count_flops_per_token
from gangline.model.local_sizes import LocalSizes
from gangline.model.matmuls import AttentionMatmuls, Matmul
from gangline.model.tree import iterate_nodes
from gangline_basics.explain.timeline import ActionTimes, step_timeline


def explained(words: str):
    run = compose_one(words.split())
    return run, run.parallel.explain(run, Mesh.of(run.parallel.size_axes(run.launch.processes or 1)))


def test_single_explanation_matches_model_flops():
    run, found = explained("parallel=single batch.micro_size=4 precision=bf16")
    tree, plan = compose_model(run)
    assert found.tokens == 16 * 128
    assert found.microbatches == 4
    assert found.token_flops == count_flops_per_token(tree, 128, plan)
    assert found.ranks[0].flops == found.token_flops * found.tokens
    assert found.work[0].flops * 3 * 4 == found.ranks[0].flops
    assert [action.kind for turn in found.ranks[0].turns for action in turn] == ["F", "B"] * 4
    assert found.ranks[0].bytes["master weights"] == 2 * found.ranks[0].bytes["weights"] == 4 * found.parameters
    assert found.ranks[0].bytes["optimizer state"] == 8 * found.parameters
    assert found.ranks[0].transfers == ()
    assert found.unknown == ()


def test_recompute_adds_flops_and_reduces_activations():
    _, plain = explained("parallel=single batch.micro_size=4")
    _, full = explained("parallel=single batch.micro_size=4 run.recompute=full")
    blocks = sum(matmul.flops * times for matmul, times in full.work[0].recompute.items())
    assert full.ranks[0].flops == plain.ranks[0].flops + 4 * blocks
    assert full.ranks[0].bytes["activations"] < plain.ranks[0].bytes["activations"]


def test_ddp_explanation_counts_all_reduce_bytes():
    _, found = explained("parallel=ddp launch.processes=4 parallel.bucket_mb=1")
    (sent,) = found.ranks[0].transfers
    assert sent.bytes == 2 * 4 * found.parameters * 3 // 4
    assert (sent.operation, sent.ranks, sent.when, sent.waits, sent.tier) == ("all_reduce", 4, "end", False, "node")
    assert sent.calls == -(-4 * found.parameters // 2**20)
    assert found.microbatches == 1
    assert found.tokens == 16 * 128


def test_decoder_node_matmuls_sum_to_node_flops():
    tree, _ = compose_model(compose_one(["model.window=32", "model.full_every=2", "model.qk_norm=true"]))
    sizes = LocalSizes(tokens=256, inner_tokens=256, itemsize=2, master_itemsize=4, ranks={})
    for path, node in iterate_nodes(tree):
        assert sum(matmul.flops for matmul in node.list_matmuls(sizes, 128)) == node.count_flops(128) * 256, path


def test_attention_flops_count_causality_and_window():
    matmul = AttentionMatmuls(sequences=1, queries=128, keys=128, heads=2, kv_heads=1, head_dim=8)
    assert matmul.visible == 129 / 256
    assert replace(matmul, window=16).visible == 1.0
    assert replace(matmul, window=16).flops == matmul.flops / 8
    assert Matmul(rows=2, inner=3, columns=5).flops == 60


def test_timeline_runs_actions_as_early_as_possible():
    """Compare with a schedule by hand: two stages, two microbatches, 1F1B."""
    _, one = explained("parallel=single batch.micro_size=8")
    order = ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    ranks = tuple(
        replace(one.ranks[0], turns=tuple((StepAction(word[0], stage, int(word[1])),) for word in words.split()))
        for stage, words in enumerate(order)
    )
    two = replace(one, ranks=ranks, work=one.work * 2)
    found = step_timeline(two, [ActionTimes(1, 1, 1)] * 2, latency=0.5)
    ends = [{f"{a.kind}{a.microbatch}": end for a, _, end in spans} for spans in found.spans]
    assert ends[0] == {"F0": 1, "F1": 2, "B0": 7, "B1": 10}
    assert ends[1] == {"F0": 2.5, "B0": 4.5, "F1": 5.5, "B1": 7.5}
    assert found.makespan == 10
    assert found.bubble == pytest.approx(1 - 12 / 20)


def test_timeline_names_deadlocked_rank():
    _, one = explained("parallel=single batch.micro_size=16")
    stuck = replace(one.ranks[0], turns=((StepAction("B", 0, 0),), (StepAction("F", 0, 0),)))
    with pytest.raises(ValueError, match="deadlock in the pipeline schedule: rank 0 waits forever"):
        step_timeline(replace(one, ranks=(stuck,)), [ActionTimes(1, 1, 1)])


def test_explain_imports_no_torch():
    script = (
        "import sys; from gangline.config.compose import compose_one; from gangline.mesh import Mesh; "
        "run = compose_one(['parallel=ddp', 'launch.processes=8']); import gangline_basics.cluster.file; "
        "assert run.parallel.explain(run, Mesh.of({'dp_replicate': 8})).parameters; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
