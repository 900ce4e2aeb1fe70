"""Published model sizes, each a part of group `model`: the decoder's options with other defaults. Torch-free."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from functools import partialmethod
from typing import Any, get_type_hints

from gangline.plugin.parts import Part
from gangline_basics.model.config import BUILD, DecoderConfig

LLAMA3: dict[str, Any] = {"vocab_size": 128_256, "kv_heads": 8, "rope_theta": 500_000.0, "rope_scaling_factor": 8.0}
QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "kv_heads": 8,
    "head_dim": 128,
    "qk_norm": True,
    "norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}

# part -> (source of the sizes, defaults that differ from the decoder's)
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    # SwiGLU with ffn_dim = 8/3 · dim has as many parameters as GPT-2's feed-forward with 4 · dim
    "gpt2-124m": ("124 M parameters, the size of GPT-2 small", {"vocab_size": 50_257, "tied": True}),
    "llama3-1b": (
        "the shape of Llama 3.2 1B, as in meta-llama/Llama-3.2-1B/config.json",
        LLAMA3 | {"dim": 2048, "layers": 16, "heads": 32, "ffn_dim": 8192, "tied": True, "rope_scaling_factor": 32.0},
    ),
    "llama3-8b": (
        "the shape of Llama 3.1 8B, as in meta-llama/Llama-3.1-8B/config.json",
        LLAMA3 | {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 14_336},
    ),
    "llama3-70b": (
        "the shape of Llama 3.1 70B, as in meta-llama/Llama-3.1-70B/config.json",
        LLAMA3 | {"dim": 8192, "layers": 80, "heads": 64, "ffn_dim": 28_672},
    ),
    "llama3-405b": (
        "the shape of Llama 3.1 405B, as in meta-llama/Llama-3.1-405B/config.json",
        LLAMA3 | {"dim": 16_384, "layers": 126, "heads": 128, "ffn_dim": 53_248},
    ),
    "qwen3-0.6b": (
        "the shape of Qwen3 0.6B, as in Qwen/Qwen3-0.6B/config.json",
        QWEN3 | {"dim": 1024, "layers": 28, "heads": 16, "ffn_dim": 3072, "tied": True},
    ),
    "qwen3-8b": (
        "the shape of Qwen3 8B, as in Qwen/Qwen3-8B/config.json",
        QWEN3 | {"dim": 4096, "layers": 36, "heads": 32, "ffn_dim": 12_288},
    ),
}


TYPES = get_type_hints(DecoderConfig)


def _make_preset(name: str, about: str, sizes: dict[str, Any]) -> type[DecoderConfig]:
    """Return a class for a preset, because the class of a configuration identifies its part."""
    fields = [(key, TYPES[key], field(default=value)) for key, value in sizes.items()]
    title = "".join(word.capitalize() for word in name.replace(".", "_").split("-"))
    namespace: dict[str, Any] = {"__doc__": f"{about[0].upper()}{about[1:]}.", "__module__": __name__}
    namespace["__init__"] = partialmethod(DecoderConfig.__init__, **sizes)
    inherited: dict[str, Any] = dict.fromkeys(("init", "repr", "eq", "match_args"), False)  # saves 0.4 ms per preset
    preset = make_dataclass(title, fields, bases=(DecoderConfig,), namespace=namespace, **inherited)
    globals()[title] = preset  # for pickle
    return preset


PRESETS = {name: _make_preset(name, about, sizes) for name, (about, sizes) in SIZES.items()}
PARTS = tuple(
    Part(name=name, config=config, summary=SIZES[name][0].split(", as in")[0], build=BUILD)
    for name, config in PRESETS.items()
)
