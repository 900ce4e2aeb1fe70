"""Who supplies what, installed or not: so that a wish that cannot be met here still gets an answer.

The only file of core that names plugins. Nothing is imported from it but text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).resolve().parents[4]  # of core's own source: where its siblings lie


@dataclass(frozen=True)
class KnownPart:
    """One part that some distribution is known to supply."""

    group: str
    name: str
    distribution: str
    summary: str
    edit: bool = False  # a model edit: its group has `off` even where nothing supplies the group


_PARALLEL = "gangline-parallel-megatron-style"
_MOE = "gangline-moe"
_DATA = "gangline-dataloader"
_FINETUNE = "gangline-finetune"
_HEALTH = "gangline-health"
_MODELS = "gangline-models"
_LAUNCH = "gangline-launch"
_TRACK = "gangline-track"

ENTRIES = (
    KnownPart("parallel", "3d", _PARALLEL, "Tensor, pipeline, context and sharded data parallelism together"),
    KnownPart("parallel", "fsdp", _PARALLEL, "Weights, gradients and optimizer state sharded over all ranks"),
    KnownPart("parallel", "hsdp", _PARALLEL, "Sharded inside a group of ranks, replicated over the groups"),
    KnownPart("parallel", "tp", _PARALLEL, "Tensor parallelism alone"),
    KnownPart("parallel", "pp", _PARALLEL, "Pipeline parallelism alone"),
    KnownPart("precision", "fp8", _PARALLEL, "8-bit floating-point matmuls for Hopper and newer"),
    KnownPart("moe", "on", _MOE, "Feed-forward layers become mixtures of experts", edit=True),
    KnownPart("moe", "mixtral_8x7b", _MOE, "The experts of Mixtral 8x7B", edit=True),
    KnownPart("moe", "qwen3_30b_a3b", _MOE, "The experts of Qwen3 30B-A3B", edit=True),
    KnownPart("moe", "deepseek_v3", _MOE, "The experts of DeepSeek-V3", edit=True),
    KnownPart("lora", "on", _FINETUNE, "Low-rank adapters around linears", edit=True),
    KnownPart("moe", "qwen3_next_80b", _MOE, "The experts of Qwen3-Next 80B-A3B", edit=True),
    KnownPart("moe", "gpt_oss_20b", _MOE, "The experts of gpt-oss 20B", edit=True),
    KnownPart("moe", "gpt_oss_120b", _MOE, "The experts of gpt-oss 120B", edit=True),
    KnownPart("dpo", "on", _FINETUNE, "The loss of direct preference optimization", edit=True),
    KnownPart("model", "qwen2", _MODELS, "Qwen2 and Qwen2.5"),
    KnownPart("model", "ministral", _MODELS, "Ministral"),
    KnownPart("model", "olmo2", _MODELS, "OLMo 2"),
    KnownPart("model", "olmo3", _MODELS, "OLMo 3"),
    KnownPart("model", "smollm3", _MODELS, "SmolLM 3"),
    KnownPart("model", "phi3", _MODELS, "Phi 3 and Phi 4 mini"),
    KnownPart("model", "granite", _MODELS, "Granite 3"),
    KnownPart("model", "gemma2", _MODELS, "Gemma 2"),
    KnownPart("model", "gemma3", _MODELS, "Gemma 3"),
    KnownPart("mup", "on", _MODELS, "Rates found on a narrow model hold for a wide one", edit=True),
    KnownPart("mtp", "on", _MODELS, "Further tokens are predicted, too", edit=True),
    KnownPart("model", "gpt_oss", _MODELS, "gpt-oss"),
    KnownPart("model", "deepseek_v3", _MODELS, "DeepSeek-V3"),
    KnownPart("model", "qwen3_next", _MODELS, "Qwen3-Next"),
    KnownPart("model", "gpt2", _MODELS, "GPT-2 as it is"),
    KnownPart(
        "checkpoint", "zarr", "gangline-ckpt-zarr", "Sharded, asynchronous checkpoints that any zarr reader opens"
    ),
    KnownPart("data", "tokens", _DATA, "A corpus prepared as tokens, mapped from disk or a store"),
    KnownPart("data", "mix", _DATA, "A weighted mixture of sources"),
    KnownPart("data", "chat", _FINETUNE, "Conversations, of which what the assistant says is learnt"),
    KnownPart("data", "preferences", _FINETUNE, "Pairs of answers, one chosen and one rejected"),
    KnownPart("callback", "eval", _FINETUNE, "Tasks of lm-eval while a run lives"),
    KnownPart("data", "dali", _DATA, "Data read and prepared by NVIDIA DALI"),
    KnownPart(
        "health",
        "chaos",
        _HEALTH,
        "faults on purpose: killed, stopped, slow and hanging ranks, bad numbers, a full disk, a lost store",
    ),
    KnownPart("launch", "slurm", _LAUNCH, "A job of Slurm, with an elastic agent on each of its nodes"),
    KnownPart("launch", "kubernetes", _LAUNCH, "A JobSet in a queue of Kueue, with an elastic agent in each pod"),
    KnownPart("track", "wandb", _TRACK, "Weights & Biases: online, offline or disabled"),
    KnownPart("track", "mlflow", _TRACK, "MLflow: a tracking server, or a file of SQLite"),
    KnownPart("track", "trackio", _TRACK, "Trackio: a file of SQLite here, a Space, or a server"),
    KnownPart("simulator", "events", _HEALTH, "Faults, saves, spares and repairs of a long job, from event to event"),
    KnownPart("health", "on", _HEALTH, "Spikes, divergence, not finite: found before a step is applied, and answered"),
)


# Words of other frameworks that the options of these parts answer -> what to type; {n}: the number that the user gave.
WORDS = {
    "tp tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size": (
        "parallel=tp launch.processes={n}, or with other axes  parallel=3d parallel.tp={n}"
    ),
    "pp pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size": (
        "parallel=pp launch.processes={n}, or with other axes  parallel=3d parallel.pp={n}"
    ),
    "cp context_parallel context_parallel_size context_parallel_degree": (
        "parallel=3d parallel.cp={n} launch.processes={n}"
    ),
    "dp data_parallel data_parallel_size ddp": "parallel=ddp launch.processes={n}",
    "fsdp fully_sharded_data_parallel": "parallel=fsdp launch.processes={n}",
    "zero zero_stage": "parallel=fsdp parallel.zero={n}  (1 shards optimizer state, 2 gradients too, 3 weights too)",
    "ep expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size": "moe=on moe.ep={n}",
    "dropout attention_dropout attn_dropout hidden_dropout resid_dropout residual_dropout": (
        "optimizer.weight_decay=0.1  (models have no dropout here; adapters have lora.dropout)"
    ),
}


# Verbs of `gangline` that come with a distribution.
VERBS = {
    "ckpt": "gangline-ckpt-zarr",
    "conform": "gangline-testkit",
    "data": _DATA,
    "eval": _FINETUNE,
    "health": _HEALTH,
    "launch": _LAUNCH,
    "moe": _MOE,
    "new-plugin": "gangline-testkit",
    "parallel": _PARALLEL,
    "plan": "gangline-planner",
}


def get(distribution: str) -> str:
    """The command that installs a distribution: from beside core where its source lies there, else by name."""
    sibling = TREE / distribution.removeprefix("gangline-")
    return f"pip install -e {sibling}" if (sibling / "pyproject.toml").is_file() else f"pip install {distribution}"


def supplier(group: str, name: str) -> str | None:
    """The distribution that is known to supply `group=name`, or None."""
    listed = next((entry for entry in ENTRIES if entry.group == group and entry.name == name), None)
    return listed.distribution if listed else None


def suppliers(group: str) -> dict[str, str]:
    """Distributions known to supply parts of `group` -> the parts, as words."""
    found: dict[str, list[str]] = {}
    for entry in ENTRIES:
        if entry.group == group:
            found.setdefault(entry.distribution, []).append(entry.name)
    return {dist: ", ".join(names) for dist, names in found.items()}


def groups() -> list[str]:
    """Every group that the catalogue knows."""
    return list(dict.fromkeys(entry.group for entry in ENTRIES))


def edit_groups() -> set[str]:
    """The groups of model edits among them."""
    return {entry.group for entry in ENTRIES if entry.edit}


def names(group: str) -> list[str]:
    """The parts of `group` known by name."""
    return [entry.name for entry in ENTRIES if entry.group == group]
