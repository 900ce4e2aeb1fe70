"""Presets of published models, parts of group `model`: a family's options with other defaults. Torch-free."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from functools import partialmethod
from typing import Any, get_type_hints

from gangline_models.families.base import FamilyConfig
from gangline_models.families.deepseek import DeepSeek
from gangline_models.families.gemma import Gemma2, Gemma3
from gangline_models.families.gpt2 import Gpt2
from gangline_models.families.gpt_oss import GptOss
from gangline_models.families.granite import Granite
from gangline_models.families.olmo import Olmo2
from gangline_models.families.phi3 import Phi3
from gangline_models.families.qwen2 import Qwen2
from gangline_models.families.qwen3_next import Qwen3Next

QWEN25 = {"vocab_size": 152_064, "norm_eps": 1e-6}
OLMO2 = {"vocab_size": 100_352, "norm_eps": 1e-6}
GPT_OSS = {"vocab_size": 201_088, "head_dim": 64}  # with moe=gpt_oss_20b and moe=gpt_oss_120b
DEEPSEEK = {"dim": 7168, "layers": 61, "heads": 128, "ffn_dim": 18_432, "vocab_size": 129_280}  # with moe=deepseek_v3
GEMMA2 = {"vocab_size": 256_000, "head_dim": 256}


def _make_sizes(dim: int, layers: int, heads: int, kv_heads: int, hidden: int) -> dict[str, Any]:
    return {"dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn_dim": hidden}


def _make_gpt2_sizes(dim: int, layers: int, heads: int) -> dict[str, Any]:
    return {"dim": dim, "layers": layers, "heads": heads, "ffn_dim": 4 * dim}


# part -> (family, title, repository whose config.json has the sizes, defaults that differ from the family's)
SHAPES: dict[str, tuple[type[FamilyConfig], str, str, dict[str, Any]]] = {
    "gpt2-medium": (Gpt2, "GPT-2 medium", "openai-community/gpt2-medium", _make_gpt2_sizes(1024, 24, 16)),
    "gpt2-large": (Gpt2, "GPT-2 large", "openai-community/gpt2-large", _make_gpt2_sizes(1280, 36, 20)),
    "gpt2-xl": (Gpt2, "GPT-2 XL", "openai-community/gpt2-xl", _make_gpt2_sizes(1600, 48, 25)),
    "qwen2.5-0.5b": (
        Qwen2,
        "Qwen2.5 0.5B",
        "Qwen/Qwen2.5-0.5B",
        {**_make_sizes(896, 24, 14, 2, 4864), "vocab_size": 151_936, "tied": True},
    ),
    "qwen2.5-7b": (Qwen2, "Qwen2.5 7B", "Qwen/Qwen2.5-7B", QWEN25 | _make_sizes(3584, 28, 28, 4, 18_944)),
    "qwen2.5-72b": (
        Qwen2,
        "Qwen2.5 72B",
        "Qwen/Qwen2.5-72B",
        QWEN25 | _make_sizes(8192, 80, 64, 8, 29_568) | {"norm_eps": 1e-5},
    ),
    "olmo2-7b": (Olmo2, "OLMo 2 7B", "allenai/OLMo-2-1124-7B", OLMO2 | _make_sizes(4096, 32, 32, 32, 11_008)),
    "olmo2-13b": (Olmo2, "OLMo 2 13B", "allenai/OLMo-2-1124-13B", OLMO2 | _make_sizes(5120, 40, 40, 40, 13_824)),
    "phi3-mini": (
        Phi3,
        "Phi 3 mini, 4k",
        "microsoft/Phi-3-mini-4k-instruct",
        {**_make_sizes(3072, 32, 32, 32, 8192), "vocab_size": 32_064, "window": 2047},
    ),
    "granite3-8b": (
        Granite,
        "Granite 3.0 8B",
        "ibm-granite/granite-3.0-8b-base",
        {
            **_make_sizes(4096, 40, 32, 8, 12_800),
            "vocab_size": 49_155,
            "tied": True,
            "norm_eps": 1e-5,
            "logits_scaling": 16.0,
            "attention_multiplier": 0.0078125,
        },
    ),
    "deepseek-v3": (DeepSeek, "DeepSeek-V3", "deepseek-ai/DeepSeek-V3", DEEPSEEK),
    "qwen3-next-80b": (  # with moe=qwen3_next_80b
        Qwen3Next,
        "Qwen3-Next 80B-A3B",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        {**_make_sizes(2048, 48, 16, 2, 5120), "vocab_size": 151_936, "rope_theta": 1e7},
    ),
    "gpt-oss-20b": (GptOss, "gpt-oss 20B", "openai/gpt-oss-20b", GPT_OSS | _make_sizes(2880, 24, 64, 8, 2880)),
    "gpt-oss-120b": (GptOss, "gpt-oss 120B", "openai/gpt-oss-120b", GPT_OSS | _make_sizes(2880, 36, 64, 8, 2880)),
    "gemma2-2b": (Gemma2, "Gemma 2 2B", "google/gemma-2-2b", GEMMA2 | _make_sizes(2304, 26, 8, 4, 9216)),
    "gemma2-9b": (Gemma2, "Gemma 2 9B", "google/gemma-2-9b", GEMMA2 | _make_sizes(3584, 42, 16, 8, 14_336)),
    "gemma2-27b": (
        Gemma2,
        "Gemma 2 27B",
        "google/gemma-2-27b",
        GEMMA2 | _make_sizes(4608, 46, 32, 16, 36_864) | {"head_dim": 128, "query_scalar": 144.0},
    ),
    "gemma3-1b": (
        Gemma3,
        "Gemma 3 1B",
        "google/gemma-3-1b-pt",
        {**_make_sizes(1152, 26, 4, 1, 6912), "vocab_size": 262_144, "head_dim": 256, "window": 512},
    ),
}


# Resolved once per family, since resolving takes 0.3 ms.
TYPES = {family: get_type_hints(family, include_extras=True) for family in {shape[0] for shape in SHAPES.values()}}


def _make_preset(name: str, family: type[FamilyConfig], about: str, sizes: dict[str, Any]) -> type[FamilyConfig]:
    """Make an option class for the preset, since a part is identified by its option class."""
    fields = [(key, TYPES[family][key], field(default=value)) for key, value in sizes.items()]
    title = "".join(word.capitalize() for word in name.replace(".", "_").split("-"))
    namespace = {"__doc__": about, "__module__": __name__, "__init__": partialmethod(family.__init__, **sizes)}
    inherited: dict[str, Any] = dict.fromkeys(("init", "repr", "eq", "match_args"), False)  # each takes 0.4 ms to make
    preset = make_dataclass(title, fields, bases=(family,), namespace=namespace, **inherited)
    globals()[title] = preset  # pickle looks up the class here
    return preset


PRESETS = {
    name: _make_preset(name, family, f"Shape of {what}, as in {source}/config.json.", sizes)
    for name, (family, what, source, sizes) in SHAPES.items()
}
