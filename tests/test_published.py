"""`benchmarks/published`: predictions next to published rows, and reasons for rows that cannot be judged."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gangline.model.matmuls import AttentionMatmuls, Matmul
from gangline.plugin.registry import installed
from gangline_basics.cluster.file import Quantity
from gangline_planner.accuracy import load_accuracy
from gangline_planner.forecast import forecast
from published import report as report_module, work
from published.calibrated import identity
from published.case import case_of
from published.report import as_data, as_text, judge
from published.row import Row, Unjudged

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "published"

# arXiv 2104.04473, table 1, with layouts of NVIDIA/Megatron-LM examples/academic_paper_scripts/sc21/run_table_1.sh
GPT_18B = {
    "id": "gpt-18b",
    "table": "sc21",
    "source": "Megatron-LM, arXiv 2104.04473, table 1",
    "model": "GPT-18B",
    "hidden": 6144,
    "heads": 48,
    "layers": 40,
    "seq": 2048,
    "vocab": 51200,
    "gpu": "A100-80GB (Selene)",
    "n_gpus": 256,
    "tp": 8,
    "pp": 1,
    "micro_batch": 8,
    "global_batch": 1024,
    "recompute": "full",
    "seq_parallel": False,
    "zero": 0,
    "precision": "fp16",
    "step_time_s": 9.399,
}
GPT_530B = GPT_18B | {
    "id": "gpt-530b",
    "model": "GPT-530B",
    "hidden": 20480,
    "heads": 128,
    "layers": 105,
    "n_gpus": 2520,
    "pp": 35,
    "vp": 3,
    "micro_batch": 1,
    "global_batch": 2520,
    "step_time_s": 54.085,
}
# MooreThreads/SimuMax docs/b200/b200_release_v1.2_summary.md
LLAMA_B200 = {
    "id": "llama-b200",
    "table": "simumax",
    "source": "MooreThreads/SimuMax docs/b200/b200_release_v1.2_summary.md",
    "model": "llama3_405b",
    "layers": 4,
    "gpu": "B200-SXM (8 GPUs)",
    "n_gpus": 8,
    "tp": 4,
    "pp": 1,
    "micro_batch": 1,
    "grad_acc": 8,
    "seq": 4096,
    "precision": "bf16",
    "step_time_s": 0.8996,
    "memory_gib": 52.89,
}


def judgeable(fields):
    return case_of(Row(fields))


@pytest.mark.parametrize("row", [GPT_18B, GPT_530B, LLAMA_B200], ids=lambda row: row["id"])
def test_published_steps_are_predicted(row):
    (judged,) = judge([Row(row)]).judged
    assert abs(judged.error) < 0.15


def test_published_memory_is_predicted():
    (judged,) = judge([Row(LLAMA_B200)]).judged
    assert judged.published_bytes == 52.89 * 2**30
    assert abs(judged.memory_error) < 0.05


def test_gpt_parameter_counts_match_model_names():
    """Compare with arXiv 2104.04473, table 1: 18.4 and 529.6 billion."""
    assert judgeable(GPT_18B).explained.parameters == pytest.approx(18.4e9, rel=0.02)
    assert judgeable(GPT_530B).explained.parameters == pytest.approx(529.6e9, rel=0.01)
    assert judgeable(GPT_530B).explained.unknown == ()


def test_deepseek_v3_has_published_parameter_count():
    """Compare with arXiv 2412.19437, section 4.2: 671 billion."""
    row = {"model": "DeepSeekV3", "gpu": "DGX-B200", "n_gpus": 256, "tp": 1, "pp": 16, "ep": 8, "micro_batch": 1,
           "global_batch": 2048, "seq": 4096, "precision": "MXFP8", "tokens_per_s_per_gpu": 3000.0}  # fmt: skip
    case = judgeable(row)
    assert case.explained.parameters == pytest.approx(671e9, rel=0.01)
    assert case.explained.matmul_format == "fp8"
    assert case.seconds == pytest.approx(2048 * 4096 / 3000 / 256)


def test_tflops_use_operation_count_of_model():
    row = {key: value for key, value in LLAMA_B200.items() if key != "step_time_s"} | {"tflops_per_gpu": 1000}
    case = judgeable(row)
    assert case.seconds == pytest.approx(case.explained.token_flops * 16 * 4096 / 1e15 / 8)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step_time_s": None}, "no step time"),
        ({"gpu": "Gaudi 2"}, "no cluster file for Gaudi 2"),
        ({"gpu": None}, "an unnamed accelerator"),
        ({"hidden": None}, "shapes of GPT-18B are not known"),
        ({"seq": None}, "its sequence length is not published"),
        ({"n_gpus": "96..4608"}, "n_gpus is '96..4608'; expected an integer"),
        ({"n_gpus": -4}, "n_gpus is -4; expected an integer"),
        ({"tp": "eight"}, "tp is 'eight'; expected an integer"),
        ({"pp": 0.5}, "pp is 0.5; expected an integer"),
        ({"cp": float("nan")}, "cp is nan; expected an integer"),
        ({"micro_batch": []}, r"micro_batch is \[\]; expected an integer"),
        ({"global_batch": 10**30}, "expected a number from 1 to 10,000,000"),
        ({"global_batch": -8}, "global_batch is -8; expected a number"),
        ({"pp": 7}, "does not divide 256"),
        ({"global_batch": 1000}, "does not divide over 32 data ranks"),
        ({"pp": 16, "tp": 1, "vp": 9, "global_batch": 2048}, "cannot be divided into"),
    ],
)
def test_unusable_rows_are_listed_with_reasons(change, reason):
    with pytest.raises(Unjudged, match=reason):
        judgeable(GPT_18B | change)
    report = judge([Row(GPT_18B | change), Row(GPT_530B)])
    assert [name for name, _ in report.left_out] == ["gpt-18b"]
    assert len(report.judged) == 1


def test_expert_parallel_size_must_divide_its_ranks():
    """Check Qwen3 235B with 16 data ranks and tp=2, hence 32 ranks for experts: ep=32 is possible, ep=64 is not."""
    row = {"model": "Qwen3_235B_a22B", "gpu": "DGX-H100", "n_gpus": 256, "tp": 2, "pp": 8, "vp": 4, "ep": 32,
           "micro_batch": 1, "global_batch": 8192, "seq": 4096, "precision": "FP8", "step_time_s": 81.0}  # fmt: skip
    assert judgeable(row).explained.parameters == pytest.approx(235e9, rel=0.02)
    with pytest.raises(Unjudged, match="ep=64 does not divide the 32 ranks of dp_shard x cp x tp"):
        judgeable(row | {"ep": 64})


def test_only_megatron_2021_attention_stores_scores():
    """Check 5 a s^2 b bytes per block in addition to those of flash attention (arXiv 2205.05198, section 4.1)."""
    old, new = (judgeable(GPT_18B | {"source": source}).explained for source in ("Megatron-LM", "a blog of 2024"))
    assert old.work[0].saved_bytes - new.work[0].saved_bytes == 40 * 5 * (48 // 8) * 2048**2 * 8
    assert not any(isinstance(matmul, AttentionMatmuls) for matmul in old.work[0].forward)


def gradients(row):
    return [sent for sent in judgeable(row).explained.ranks[0].transfers if sent.purpose == "gradients"]


def test_megatron_2021_reduces_16_bit_gradients_after_backward():
    """Check `allreduce_gradients` of Megatron-LM 2.5 (megatron/model/distributed.py) and torch DDP, which overlaps."""
    (own,), (torch,), (new,) = (
        gradients(GPT_18B | change) for change in ({}, {"notes": "torch DDP"}, {"source": "a blog of 2024"})
    )
    assert (own.waits, torch.waits, new.waits) == (True, False, False)
    assert 2 * own.bytes == new.bytes


def test_nanotron_zero1_all_reduces_gradients_after_backward():
    row = GPT_18B | {"gpu": "H100", "source": "nanotron", "precision": "bf16", "zero": 1}
    (theirs,), (other,) = gradients(row), gradients(row | {"source": "a blog"})
    assert (theirs.operation, theirs.waits, theirs.bytes) == ("all_reduce", True, 2 * other.bytes)
    assert (other.operation, other.waits) == ("reduce_scatter", False)
    (plain,) = gradients(row | {"zero": 0})
    assert not plain.waits


def test_unpublished_microbatch_defaults_to_fastest_that_fits():
    open_row = {key: value for key, value in LLAMA_B200.items() if key not in ("micro_batch", "grad_acc")}
    case = judgeable(open_row | {"global_batch": 16})
    assert case.assumed[0].startswith("micro_batch ")
    assert case.explained.ranks[0].memory <= case.cluster["memory.bytes"]


@pytest.mark.parametrize(("room", "fits"), [(0.94, False), (1.06, True)])
def test_out_of_memory_is_predicted_around_measured_peak(room, fits):
    """Set the memory limit 6 % below and above the measured peak of each published run."""
    layouts = [
        {},
        {"tp": 8, "memory_gib": 38.57},
        {"tp": 2, "memory_gib": 81.59},
        {"tp": 1, "pp": 2, "memory_gib": 87.08},
    ]
    for change in layouts:
        case = judgeable(LLAMA_B200 | change)
        limit = case.cluster.replace_numbers({"memory.bytes": Quantity(case.memory * room, "a test")})
        assert forecast(case.explained, limit).fits is fits


def run_benchmark(*words):
    command = [sys.executable, str(BENCHMARK), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_benchmark_prints_predictions_and_reasons(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [GPT_18B, LLAMA_B200, {"id": "failures", "count": 3}]}))
    ran = run_benchmark(path)
    assert ran.returncode == 0, ran.stderr
    assert "not judged: 1 of 3" in ran.stdout
    assert "gpt-18b" in ran.stdout
    found = json.loads(run_benchmark(path, "--json").stdout)
    assert (found["judged"], found["total"]) == (2, 3)
    assert found["rows"][0]["predicted"] > 0
    assert found["left_out"] == [{"id": "failures", "reason": "no step time, tokens/s or TFLOP/s are published"}]


def test_benchmark_refuses_a_missing_file(tmp_path):
    ran = run_benchmark(tmp_path / "rows.json")
    assert ran.returncode == 2
    assert ran.stderr.startswith("benchmarks/published: cannot read ")


@pytest.fixture
def planner_alone(monkeypatch):
    """Hide all installed plugins but the planner."""
    with monkeypatch.context() as patch:
        patch.setenv("GANGLINE_PLUGINS", "planner")
        installed.cache_clear()
        yield
    installed.cache_clear()


def test_row_without_its_strategy_installed_is_left_out(planner_alone):
    row = {
        "id": "gpt-1b", "table": "t", "model": "GPT-1.7B", "hidden": 2304, "heads": 24, "layers": 24, "seq": 2048,
        "vocab": 51200, "gpu": "A100-80GB", "n_gpus": 32, "tp": 2, "pp": 1, "micro_batch": 8, "global_batch": 512,
        "step_time_s": 1.0,
    }  # fmt: skip
    assert judge([Row(row)]).left_out == (("gpt-1b", "gangline-parallel-megatron-style is not installed"),)


def test_errors_of_calibrated_rows_are_separate(monkeypatch):
    monkeypatch.setattr(report_module, "calibrated_rows", lambda: {identity(Row(GPT_530B))})
    report = judge([Row(GPT_18B), Row(GPT_530B)])
    assert [one.calibrated for one in report.judged] == [False, True]
    assert report.fresh == [replace(report.judged[0])]
    assert "rows not used in the fit" in as_text(report)


def test_report_without_held_out_rows_quotes_stored_accuracy(monkeypatch):
    monkeypatch.setattr(report_module, "calibrated_rows", lambda: {identity(Row(GPT_530B))})
    report = judge([Row(GPT_530B)])
    assert "All rows were used in the fit" in as_text(report)
    assert as_data(report)["elsewhere"] == dict(load_accuracy())
    assert load_accuracy()["rows"] > 300


def test_row_identity_depends_on_time_not_id():
    assert identity(Row(GPT_18B | {"id": "other", "notes": "torch DDP"})) == identity(Row(GPT_18B))
    assert identity(Row(GPT_18B | {"n_gpus": 256.0})) == identity(Row(GPT_18B))
    assert identity(Row(GPT_18B | {"step_time_s": 9.4})) != identity(Row(GPT_18B))


def test_assumed_fields_do_not_change_row_identity():
    row = {name: value for name, value in GPT_18B.items() if name not in ("seq", "recompute")}
    row["source"] = "NVIDIA/Megatron-LM images/tables.tex"
    case = judgeable(row)
    assert case.assumed == ("seq 1024", "recompute full")
    assert identity(case.row) == identity(Row(row))


def test_layout_with_empty_stages_is_not_judged():
    row = {"model": "DeepSeekV3", "gpu": "DGX-H100", "n_gpus": 64, "pp": 4, "vp": 4, "ep": 16, "global_batch": 64}
    with pytest.raises(Unjudged):
        of_container("26.02", **row, layers=4, precision="FP8")


def test_hybrid_has_published_parameters_and_operations():
    """Check Nemotron 3 Nano: 31.6 billion parameters and 22.3e9 FLOPs per token at length 8192, as NVIDIA counts."""
    row = {"model": "Nemotron_3_Nano", "gpu": "DGX-B300", "n_gpus": 8, "tp": 1, "pp": 1, "ep": 8, "micro_batch": 4,
           "global_batch": 512, "seq": 8192, "precision": "MXFP8", "tokens_per_s_per_gpu": 37316.0}  # fmt: skip
    case = judgeable(row)
    assert case.explained.parameters == pytest.approx(31.6e9, rel=0.01)
    assert case.explained.token_flops == pytest.approx(22.3e9, rel=0.03)
    assert case.explained.unknown == ()


def test_dense_hybrid_parameter_count_matches_model_name():
    row = {"model": "NemotronH_56B", "gpu": "DGX-GB200", "n_gpus": 64, "tp": 2, "pp": 1, "micro_batch": 1,
           "global_batch": 192, "seq": 8192, "precision": "FP8", "step_time_s": 1.0}  # fmt: skip
    found = judgeable(row).explained
    assert found.parameters == pytest.approx(56e9, rel=0.02)
    assert found.unknown == ()


NEMO = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md, section 26.04 NeMo Container"
QWEN = {"model": "Qwen3_30B_a3B", "gpu": "DGX-GB200", "n_gpus": 8, "tp": 1, "pp": 1, "ep": 8, "micro_batch": 4,
        "global_batch": 512, "seq": 4096, "precision": "MXFP8",
        "tokens_per_s_per_gpu": 26032.0, "source": NEMO}  # fmt: skip


def test_cuda_graph_step_has_no_launch_cost():
    """Compare the recipes of Megatron-Bridge 26.04 and 26.06; those from 26.06 on use CUDA graphs."""
    before, after = (
        judgeable(QWEN | {"source": source}).explained for source in (NEMO, NEMO.replace("26.04", "26.06"))
    )
    assert (before.work[0].modules > 0, after.work[0].modules) == (True, 0)
    assert before.work[0].saved_bytes > after.work[0].saved_bytes
    widths = [{p.head_dim for p in one.work[0].forward if isinstance(p, AttentionMatmuls)} for one in (before, after)]
    assert widths == [{128}, {64}]


def test_block_scaled_activations_are_kept_twice():
    mixed, whole, four = (
        judgeable(LLAMA_B200 | {"precision": precision}).explained.work[0].saved_bytes
        for precision in ("MXFP8", "FP8-CS (FP8-MX)", "NVFP4")
    )
    assert mixed - whole == 2 * (four - whole) > 0


def test_rowwise_fp8_matmuls_run_at_bf16_speed():
    row = GPT_18B | {"source": "torchtitan", "gpu": "H100", "zero": 0}
    assert judgeable(row | {"precision": "fp8 rowwise"}).explained.matmul_format == "bf16"
    assert judgeable(row | {"precision": "fp8 tensorwise"}).explained.matmul_format == "fp8"


def test_torchtitan_overlaps_tp_only_with_async_tp():
    row = GPT_18B | {"source": "torchtitan benchmarks/asyncTP.md", "gpu": "H100", "precision": "bf16"}
    ways = []
    for technique in ("vanilla TP", "async TP"):
        transfers = judgeable(row | {"technique": technique}).explained.ranks[0].transfers
        ways.append({sent.waits for sent in transfers if sent.axes == ("tp",)})
    assert (True in ways[0], ways[1]) == (True, {False})


def test_embedding_and_head_stages_hold_no_block():
    """Check Llama 3 405B: 126 blocks on 16 x 8 stages. The first has only the embedding, the last only the head."""
    row = {"model": "LLAMA3.1_405B", "gpu": "DGX-GB200", "n_gpus": 256, "tp": 4, "pp": 16, "vp": 8, "micro_batch": 1,
           "global_batch": 64, "seq": 8192, "precision": "MXFP8", "tokens_per_s_per_gpu": 800.0}  # fmt: skip
    work = judgeable(row).explained.work
    assert (len(work), sum(work[0].forward.values())) == (128, 0)
    assert [matmul.block for matmul in work[-1].forward] == [False]


@pytest.mark.parametrize(
    ("change", "world"),
    [
        ({"n_gpus": None, "dp": 32}, 256),
        ({"n_gpus": None, "nodes": 32}, 256),
        ({"n_gpus": "256"}, 256),
        ({"n_gpus": 2048, "dp": 4, "global_batch": 4, "micro_batch": 1}, 32),
    ],
)
def test_world_size_is_inferred_from_layout(change, world):
    assert judgeable(GPT_18B | change).explained.mesh.world == world


def test_microbatches_follow_from_gradient_accumulation():
    row = {name: value for name, value in GPT_18B.items() if name != "micro_batch"}
    assert judgeable(row | {"grad_acc": 8}).explained.microbatches == 8


@pytest.mark.parametrize("change", [{"technique": "LoRA"}, {"model": "llama3_70b LoRA"}, {"table": "some_lora"}])
def test_lora_base_weights_have_no_gradients(change):
    row = LLAMA_B200 | {"model": "llama3_70b", "layers": 8}
    whole, adapted = (judgeable(row | one).explained.work[0].weights for one in ({}, change))
    assert sum(whole.values()) > 0 == sum(adapted.values())


# Megatron-Bridge's docs/performance-summary.md and its archive
OF_CONTAINERS = {
    "source": "Megatron-Bridge docs/performance-summary.md, section {} NeMo Container",
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "micro_batch": 1,
    "seq": 4096,
    "step_time_s": 1.0,
}


def of_container(at: str, **row):
    return judgeable({**OF_CONTAINERS, "source": OF_CONTAINERS["source"].format(at), **row}).explained


def sent_to_experts(explained, when):
    return [sent for sent in explained.ranks[0].transfers if sent.axes == ("ep",) and sent.when == when]


def test_llama_70b_pipeline_defaults_to_five_chunks():
    row = {"model": "LLAMA3_70B", "gpu": "DGX-GB300", "n_gpus": 64, "pp": 4, "global_batch": 256, "precision": "MXFP8"}
    assert len(of_container("26.02", **row).work) == 20
    assert len(of_container("26.02", **row, vp=1).work) == 4
    assert len(judgeable({**OF_CONTAINERS, **row, "source": "someone's"}).explained.work) == 4


def test_expert_biases_are_added_in_32_bits(monkeypatch):
    row = {"model": "GPT OSS 20B", "gpu": "DGX-GB300", "n_gpus": 8, "ep": 8, "global_batch": 8, "precision": "BF16"}
    saved_bytes = of_container("26.02", **row).work[0].saved_bytes
    monkeypatch.setattr(work, "with_biases", lambda stage: stage)
    tokens, top_k, layers, dim = 4096, 4, 24, 2880
    assert saved_bytes - of_container("26.02", **row).work[0].saved_bytes == 17 * tokens * top_k * layers * dim


def test_head_of_cuda_graph_step_uses_8_bits():
    row = {"model": "GPT OSS 20B", "gpu": "DGX-GB300", "n_gpus": 8, "ep": 8, "global_batch": 8, "precision": "MXFP8"}

    def heads(at):
        return {p.block for p in of_container(at, **row).work[-1].forward if getattr(p, "columns", 0) == 201_088}

    assert heads("26.06") == {True}
    assert heads("26.04") == {False}


def test_recomputed_experts_receive_tokens_again():
    row = {"model": "Nemotron_3_Nano", "n_gpus": 16, "ep": 8, "global_batch": 32, "seq": 8192, "precision": "FP8"}
    again, once = of_container("26.06", gpu="DGX-H100", **row), of_container("26.06", gpu="DGX-B200", **row)
    assert len(sent_to_experts(again, "B")) == 2 * len(sent_to_experts(once, "B")) == 2
    assert sent_to_experts(again, "B")[-1].bytes == sent_to_experts(again, "F")[0].bytes
    made = [p for p in again.work[0].recompute if isinstance(p, Matmul)]
    assert {(p.inner, p.columns) for p in made} == {(2688, 1237), (1237, 2688), (2688, 2474), (2474, 2688)}
    assert any(isinstance(p, AttentionMatmuls) for p in again.work[0].recompute)
    assert not once.work[0].recompute


def test_deepseek_v3_token_goes_to_four_nodes():
    row = {"model": "DeepSeekV3", "gpu": "DGX-H100", "n_gpus": 64, "ep": 64, "global_batch": 64, "precision": "FP8"}
    (early,), (late,) = (sent_to_experts(of_container(at, **row), "F") for at in ("25.09", "26.02"))
    kimi = sent_to_experts(of_container("26.02", **row | {"model": "Kimi K2"}), "F")[0]  # 384 experts, one group
    different = 8 * (1 - (1 - 1 / 8) ** 8)
    layers = 58 + 1, 60  # MoE layers of DeepSeek, with its MTP module, and of Kimi K2
    assert late.bytes == pytest.approx(4 / different * kimi.bytes * layers[0] / layers[1], rel=1e-3)
    assert (early.waits, late.waits) == (False, True)
