"""Shapes of the models that published rows name, where the rows do not give them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from gangline_planner.judge.hybrids import Hybrid


@dataclass(frozen=True)
class Shapes:
    """model: options of core's decoder; moe: of the model edit `moe`, empty where it is dense."""

    source: str
    model: dict[str, Any]
    moe: dict[str, Any] = field(default_factory=dict)
    latent: bool = False  # attention over latent keys and values
    gelu: bool = False  # two products and a GELU for a feed-forward, as GPT has it
    hybrid: Hybrid | None = None


def _dense(
    source: str, dim: int, layers: int, heads: int, kv_heads: int, hidden: int, vocab: int, **more: Any
) -> Shapes:
    sizes = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "hidden": hidden, "vocab_size": vocab}
    return Shapes(source, sizes | more)


LLAMA = "arXiv 2407.21783, table 3"
# pattern of a row's `model`, in small letters without what is no letter or digit -> its shapes
KNOWN: list[tuple[str, Shapes]] = [
    (r"llama27b", _dense("arXiv 2307.09288", 4096, 32, 32, 32, 11008, 32_000)),
    (r"llama213b", _dense("arXiv 2307.09288", 5120, 40, 40, 40, 13_824, 32_000)),
    (r"llama270b", _dense("arXiv 2307.09288", 8192, 80, 64, 8, 28_672, 32_000)),
    (r"llama7b", _dense("arXiv 2302.13971, table 2", 4096, 32, 32, 32, 11_008, 32_000)),
    (r"llama13b", _dense("arXiv 2302.13971, table 2", 5120, 40, 40, 40, 13_824, 32_000)),
    (r"llama3[03]b", _dense("arXiv 2302.13971, table 2", 6656, 60, 52, 52, 17_920, 32_000)),
    (r"llama65b", _dense("arXiv 2302.13971, table 2", 8192, 80, 64, 64, 22_016, 32_000)),
    (r"llama321b", _dense("meta-llama/Llama-3.2-1B/config.json", 2048, 16, 32, 8, 8192, 128_256, tied=True)),
    (r"llama323b", _dense("meta-llama/Llama-3.2-3B/config.json", 3072, 28, 24, 8, 8192, 128_256, tied=True)),
    (r"mistral7b", _dense("arXiv 2310.06825, table 1", 4096, 32, 32, 8, 14_336, 32_000)),
    (r"qwen257b", _dense("Qwen/Qwen2.5-7B/config.json", 3584, 28, 28, 4, 18_944, 152_064)),
    (r"qwen2514b", _dense("Qwen/Qwen2.5-14B/config.json", 5120, 48, 40, 8, 13_824, 152_064)),
    (r"qwen2532b", _dense("Qwen/Qwen2.5-32B/config.json", 5120, 64, 40, 8, 27_648, 152_064)),
    (r"qwen2572b", _dense("Qwen/Qwen2.5-72B/config.json", 8192, 80, 64, 8, 29_568, 152_064)),
    (r"qwen38b", _dense("Qwen/Qwen3-8B/config.json", 4096, 36, 32, 8, 12_288, 151_936, head_dim=128, qk_norm=True)),
    (r"qwen332b", _dense("Qwen/Qwen3-32B/config.json", 5120, 64, 64, 8, 25_600, 151_936, head_dim=128, qk_norm=True)),
    (r"gpt3175b", replace(_dense("arXiv 2005.14165, table 2.1", 12_288, 96, 96, 96, 49_152, 51_200), gelu=True)),
    (r"llama3\d?8b", _dense(LLAMA, 4096, 32, 32, 8, 14_336, 128_256)),
    (r"llama3\d?70b", _dense(LLAMA, 8192, 80, 64, 8, 28_672, 128_256)),
    (r"llama3\d?405b", _dense(LLAMA, 16_384, 126, 128, 8, 53_248, 128_256)),
    (
        r"qwen330ba3b",
        Shapes(
            "Qwen/Qwen3-30B-A3B/config.json",
            _dense("", 2048, 48, 32, 4, 6144, 151_936, head_dim=128, qk_norm=True).model,
            {"experts": 128, "top_k": 8, "hidden": 768},
        ),
    ),
    (
        r"qwen3235ba22b",
        Shapes(
            "Qwen/Qwen3-235B-A22B/config.json",
            _dense("", 4096, 94, 64, 4, 12_288, 151_936, head_dim=128, qk_norm=True).model,
            {"experts": 128, "top_k": 8, "hidden": 1536},
        ),
    ),
    (
        r"gptoss120b",
        Shapes(
            "openai/gpt-oss-120b/config.json",
            _dense("", 2880, 36, 64, 8, 2880, 201_088, head_dim=64, window=128, full_every=2).model,
            {"experts": 128, "top_k": 4, "hidden": 2880},
        ),
    ),
    (
        r"gptoss20b",
        Shapes(
            "openai/gpt-oss-20b/config.json",
            _dense("", 2880, 24, 64, 8, 2880, 201_088, head_dim=64, window=128, full_every=2).model,
            {"experts": 32, "top_k": 4, "hidden": 2880},
        ),
    ),
    (
        r"kimik2",
        Shapes(
            "moonshotai/Kimi-K2-Base/config.json",
            _dense("", 7168, 61, 64, 64, 18_432, 163_840, head_dim=128).model,
            {"experts": 384, "top_k": 8, "hidden": 2048, "shared": 1, "first": 1},
            latent=True,
        ),
    ),
    (
        r"mixtral8x22b",
        Shapes(
            "mistralai/Mixtral-8x22B-v0.1/config.json",
            _dense("", 6144, 56, 48, 8, 16_384, 32_768).model,
            {"experts": 8, "top_k": 2, "hidden": 16_384},
        ),
    ),
    (
        r"deepseekv?3",
        Shapes(
            "deepseek-ai/DeepSeek-V3/config.json",
            _dense("", 7168, 61, 128, 128, 18_432, 129_280, head_dim=128).model,
            {"experts": 256, "top_k": 8, "hidden": 2048, "shared": 1, "first": 3},
            latent=True,
        ),
    ),
    (
        r"deepseekv?2$",
        Shapes(
            "deepseek-ai/DeepSeek-V2/config.json",
            _dense("", 5120, 60, 128, 128, 12_288, 102_400, head_dim=128).model,
            {"experts": 160, "top_k": 6, "hidden": 1536, "shared": 2, "first": 1},
            latent=True,
        ),
    ),
    (  # experts are up, squared ReLU and down: gated ones of two thirds of the width multiply as much
        r"nemotron3nano",
        Shapes(
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16/config.json",
            _dense("", 2688, 23, 32, 2, 1856, 131_072, head_dim=128).model,
            {"experts": 128, "top_k": 6, "hidden": 1237, "shared": 2},
            hybrid=Hybrid(mixers=23, attention=6, heads=64),
        ),
    ),
    (
        r"nemotron3super",
        Shapes(
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16/config.json; two modules for further tokens are counted in",
            _dense("", 4096, 42, 32, 2, 2688, 131_072, head_dim=128).model,
            {"experts": 512, "top_k": 22, "hidden": 1792, "shared": 2},
            hybrid=Hybrid(mixers=40, attention=10, heads=128, latent=1024, further=2),
        ),
    ),
    (  # feed-forward layers and mixers by turns, ten of attention
        r"nemotronh56b",
        Shapes(
            "nvidia/Nemotron-H-56B-Base-8K/config.json",
            _dense("", 8192, 54, 64, 8, 32_768, 131_072, head_dim=128).model,
            gelu=True,
            hybrid=Hybrid(mixers=54, attention=10, heads=256, state=256),
        ),
    ),
    (
        r"mixtral8x7b",
        Shapes(
            "arXiv 2401.04088",
            _dense("", 4096, 32, 32, 8, 14_336, 32_000).model,
            {"experts": 8, "top_k": 2, "hidden": 14_336},
        ),
    ),
]


def shapes_of(model: str) -> Shapes | None:
    """Of a published model by its name."""
    plain = re.sub(r"\([^)]*\)|[^a-z0-9]", "", model.lower())
    return next((shapes for pattern, shapes in KNOWN if re.match(rf"(meta)?{pattern}", plain)), None)
