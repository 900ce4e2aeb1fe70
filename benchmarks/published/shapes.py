"""Provide the shapes of published models, for rows that only name their model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from published.hybrids import Hybrid


@dataclass(frozen=True)
class Shapes:
    """Shapes of a model. model: options of the decoder of basics; moe: options of the edit `moe`, empty if dense."""

    model: dict[str, Any]
    moe: dict[str, Any] = field(default_factory=dict)
    latent: bool = False  # attention with latent keys and values
    gelu: bool = False  # feed-forward of two matmuls and a GELU, as in GPT
    hybrid: Hybrid | None = None
    source: str = ""


def _shapes(
    source: str,
    sizes: tuple[int, int, int, int, int, int],
    *,
    moe: dict[str, Any] | None = None,
    latent: bool = False,
    gelu: bool = False,
    hybrid: Hybrid | None = None,
    **more: Any,
) -> Shapes:
    """Return the shapes of a model.

    sizes: (dim, layers, heads, kv_heads, hidden, vocab_size); more: further options of the decoder
    """
    names = ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size")
    return Shapes(dict(zip(names, sizes, strict=True)) | more, moe or {}, latent, gelu, hybrid, source)


def _moe(experts: int, top_k: int, hidden: int, **more: int) -> dict[str, Any]:
    return {"experts": experts, "top_k": top_k, "ffn_dim": hidden} | more


LLAMA_1, LLAMA_2, LLAMA_3 = "arXiv 2302.13971, table 2", "arXiv 2307.09288", "arXiv 2407.21783, table 3"
QWEN_3: dict[str, Any] = {"head_dim": 128, "qk_norm": True}
GPT_OSS: dict[str, Any] = {"head_dim": 64, "window": 128, "full_every": 2}
# (pattern of the field `model`, reduced to lower-case letters and digits, shapes)
KNOWN: list[tuple[str, Shapes]] = [
    (r"llama27b", _shapes(LLAMA_2, (4096, 32, 32, 32, 11_008, 32_000))),
    (r"llama213b", _shapes(LLAMA_2, (5120, 40, 40, 40, 13_824, 32_000))),
    (r"llama270b", _shapes(LLAMA_2, (8192, 80, 64, 8, 28_672, 32_000))),
    (r"llama7b", _shapes(LLAMA_1, (4096, 32, 32, 32, 11_008, 32_000))),
    (r"llama13b", _shapes(LLAMA_1, (5120, 40, 40, 40, 13_824, 32_000))),
    (r"llama3[03]b", _shapes(LLAMA_1, (6656, 60, 52, 52, 17_920, 32_000))),
    (r"llama65b", _shapes(LLAMA_1, (8192, 80, 64, 64, 22_016, 32_000))),
    (r"llama321b", _shapes("meta-llama/Llama-3.2-1B/config.json", (2048, 16, 32, 8, 8192, 128_256), tied=True)),
    (r"llama323b", _shapes("meta-llama/Llama-3.2-3B/config.json", (3072, 28, 24, 8, 8192, 128_256), tied=True)),
    (r"mistral7b", _shapes("arXiv 2310.06825, table 1", (4096, 32, 32, 8, 14_336, 32_000))),
    (r"qwen257b", _shapes("Qwen/Qwen2.5-7B/config.json", (3584, 28, 28, 4, 18_944, 152_064))),
    (r"qwen2514b", _shapes("Qwen/Qwen2.5-14B/config.json", (5120, 48, 40, 8, 13_824, 152_064))),
    (r"qwen2532b", _shapes("Qwen/Qwen2.5-32B/config.json", (5120, 64, 40, 8, 27_648, 152_064))),
    (r"qwen2572b", _shapes("Qwen/Qwen2.5-72B/config.json", (8192, 80, 64, 8, 29_568, 152_064))),
    (r"qwen38b", _shapes("Qwen/Qwen3-8B/config.json", (4096, 36, 32, 8, 12_288, 151_936), **QWEN_3)),
    (r"qwen332b", _shapes("Qwen/Qwen3-32B/config.json", (5120, 64, 64, 8, 25_600, 151_936), **QWEN_3)),
    (r"gpt3175b", _shapes("arXiv 2005.14165, table 2.1", (12_288, 96, 96, 96, 49_152, 51_200), gelu=True)),
    (r"llama3\d?8b", _shapes(LLAMA_3, (4096, 32, 32, 8, 14_336, 128_256))),
    (r"llama3\d?70b", _shapes(LLAMA_3, (8192, 80, 64, 8, 28_672, 128_256))),
    (r"llama3\d?405b", _shapes(LLAMA_3, (16_384, 126, 128, 8, 53_248, 128_256))),
    (
        r"qwen330ba3b",
        _shapes("Qwen/Qwen3-30B-A3B/config.json", (2048, 48, 32, 4, 6144, 151_936), moe=_moe(128, 8, 768), **QWEN_3),
    ),
    (
        r"qwen3235ba22b",
        _shapes(
            "Qwen/Qwen3-235B-A22B/config.json", (4096, 94, 64, 4, 12_288, 151_936), moe=_moe(128, 8, 1536), **QWEN_3
        ),
    ),
    (
        r"gptoss120b",
        _shapes("openai/gpt-oss-120b/config.json", (2880, 36, 64, 8, 2880, 201_088), moe=_moe(128, 4, 2880), **GPT_OSS),
    ),
    (
        r"gptoss20b",
        _shapes("openai/gpt-oss-20b/config.json", (2880, 24, 64, 8, 2880, 201_088), moe=_moe(32, 4, 2880), **GPT_OSS),
    ),
    (
        r"kimik2",
        _shapes(
            "moonshotai/Kimi-K2-Base/config.json",
            (7168, 61, 64, 64, 18_432, 163_840),
            moe=_moe(384, 8, 2048, shared=1, first=1),
            latent=True,
            head_dim=128,
        ),
    ),
    (
        r"mixtral8x22b",
        _shapes("mistralai/Mixtral-8x22B-v0.1/config.json", (6144, 56, 48, 8, 16_384, 32_768), moe=_moe(8, 2, 16_384)),
    ),
    (r"mixtral8x7b", _shapes("arXiv 2401.04088", (4096, 32, 32, 8, 14_336, 32_000), moe=_moe(8, 2, 14_336))),
    (
        r"deepseekv?3",
        _shapes(
            "deepseek-ai/DeepSeek-V3/config.json",
            (7168, 61, 128, 128, 18_432, 129_280),
            moe=_moe(256, 8, 2048, shared=1, first=3),
            latent=True,
            head_dim=128,
        ),
    ),
    (
        r"deepseekv?2$",
        _shapes(
            "deepseek-ai/DeepSeek-V2/config.json",
            (5120, 60, 128, 128, 12_288, 102_400),
            moe=_moe(160, 6, 1536, shared=2, first=1),
            latent=True,
            head_dim=128,
        ),
    ),
    # experts have an up matmul, squared ReLU and a down matmul; gated experts of two thirds of the width have equal
    # FLOPs
    (
        r"nemotron3nano",
        _shapes(
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16/config.json",
            (2688, 23, 32, 2, 1856, 131_072),
            moe=_moe(128, 6, 1237, shared=2),
            hybrid=Hybrid(mixers=23, attention=6, heads=64),
            head_dim=128,
        ),
    ),
    (  # with two multi-token prediction modules
        r"nemotron3super",
        _shapes(
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16/config.json",
            (4096, 42, 32, 2, 2688, 131_072),
            moe=_moe(512, 22, 1792, shared=2),
            hybrid=Hybrid(mixers=40, attention=10, heads=128, latent=1024, further=2),
            head_dim=128,
        ),
    ),
    (  # feed-forward layers and mixers in turn, and ten attention layers
        r"nemotronh56b",
        _shapes(
            "nvidia/Nemotron-H-56B-Base-8K/config.json",
            (8192, 54, 64, 8, 32_768, 131_072),
            gelu=True,
            hybrid=Hybrid(mixers=54, attention=10, heads=256, state=256),
            head_dim=128,
        ),
    ),
]


def shapes_of(model: str) -> Shapes | None:
    """Return the shapes of a published model by name; None for an unknown model."""
    plain = re.sub(r"\([^)]*\)|[^a-z0-9]", "", model.lower())
    return next((shapes for pattern, shapes in KNOWN if re.match(rf"(meta)?{pattern}", plain)), None)
