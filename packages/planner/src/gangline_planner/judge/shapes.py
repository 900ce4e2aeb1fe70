"""Shapes of the models that published rows name, where the rows do not give them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shapes:
    """model: options of core's decoder; moe: of the model edit `moe`, empty where it is dense."""

    source: str
    model: dict[str, Any]
    moe: dict[str, Any] = field(default_factory=dict)
    latent: bool = False  # attention over latent keys and values


def _dense(
    source: str, dim: int, layers: int, heads: int, kv_heads: int, hidden: int, vocab: int, **more: Any
) -> Shapes:
    sizes = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "hidden": hidden, "vocab_size": vocab}
    return Shapes(source, sizes | more)


LLAMA = "arXiv 2407.21783, table 3"
# pattern of a row's `model`, in small letters without what is no letter or digit -> its shapes
KNOWN: list[tuple[str, Shapes]] = [
    (r"llama27b", _dense("arXiv 2307.09288", 4096, 32, 32, 32, 11008, 32_000)),
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
    return next((shapes for pattern, shapes in KNOWN if re.match(pattern, plain)), None)
