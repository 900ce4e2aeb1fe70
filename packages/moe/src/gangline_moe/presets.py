"""Parts of the group `moe`: the edit, with the expert sizes of published models as presets. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from gangline import Part
from gangline_moe.config import MoeOptions

BUILD = "gangline_moe.edit:edit"


@dataclass
class Mixtral8x7B(MoeOptions):
    """Experts as published in mistralai/Mixtral-8x7B-v0.1/config.json."""

    ffn_dim: int | None = 14_336


@dataclass
class Qwen3_30B_A3B(MoeOptions):
    """Experts as published in Qwen/Qwen3-30B-A3B/config.json."""

    experts: int = 128
    top_k: int = 8
    ffn_dim: int | None = 768


@dataclass
class Qwen3Next80B(MoeOptions):
    """Experts as published in Qwen/Qwen3-Next-80B-A3B-Instruct/config.json."""

    experts: int = 512
    top_k: int = 10
    ffn_dim: int | None = 512
    shared: int = 1
    shared_gate: bool = True


@dataclass
class DeepSeekV3(MoeOptions):
    """Experts of DeepSeek-V3 (arXiv 2412.19437, sections 2.1.2 and 4.2), with its router `grouped`."""

    experts: int = 256
    top_k: int = 8
    ffn_dim: int | None = 2048
    shared: int = 1
    first: int = 3


@dataclass
class GptOss20B(MoeOptions):
    """Experts as published in openai/gpt-oss-20b/config.json, with its router `biased`."""

    experts: int = 32
    top_k: int = 4
    ffn_dim: int | None = 2880


@dataclass
class GptOss120B(GptOss20B):
    """Experts as published in openai/gpt-oss-120b/config.json, with its router `biased`."""

    experts: int = 128


DEPENDS = (
    "with moe.capacity_factor, the dropped (token, expert) pairs depend on the microbatch of each rank; with moe.ep "
    "above 1, one matmul has tokens of several ranks, so run.deterministic gives equal results only up to rounding"
)


WORDS = {
    "ep expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size": "moe=on moe.ep={n}",
}


def _make_part(name: str, config: type, summary: str, router: str = "softmax") -> Part:
    return Part(
        group="moe",
        name=name,
        config=config,
        build=BUILD,
        summary=summary,
        opens={"router": router},
        capabilities={"hugging_face": "gangline_moe.interop.format:MoeFormat"} if name == "on" else {},
        words=WORDS if name == "on" else {},
        synonyms={"ffn_dim": "hidden moe_intermediate_size", "ep_axes": "ep_out_of"} if name == "on" else {},
        layout_dependent=DEPENDS,
    )


PARTS = (
    _make_part("on", MoeOptions, "mixture of experts (MoE) instead of feed-forward layers", "sigmoid"),
    _make_part("mixtral_8x7b", Mixtral8x7B, "experts of Mixtral 8x7B: 8 per layer, 2 per token"),
    _make_part("qwen3_30b_a3b", Qwen3_30B_A3B, "experts of Qwen3 30B-A3B: 128 per layer, 8 per token"),
    _make_part("gpt_oss_20b", GptOss20B, "experts of gpt-oss 20B: 32 per layer, 4 per token", "biased"),
    _make_part("gpt_oss_120b", GptOss120B, "experts of gpt-oss 120B: 128 per layer, 4 per token", "biased"),
    _make_part(
        "qwen3_next_80b", Qwen3Next80B, "experts of Qwen3-Next 80B-A3B: 512 per layer, 10 per token, and 1 shared"
    ),
    _make_part(
        "deepseek_v3", DeepSeekV3, "experts of DeepSeek-V3: 256 per layer, 8 per token, and 1 shared", "grouped"
    ),
)
