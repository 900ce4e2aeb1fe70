"""Parts of the package: model families, presets with the sizes of published models, and model edits. Torch-free."""

from __future__ import annotations

from typing import Any

from gangline import Part
from gangline_models.families.base import FamilyConfig
from gangline_models.families.deepseek import DeepSeek
from gangline_models.families.gemma import Gemma2, Gemma3
from gangline_models.families.gpt2 import Gpt2
from gangline_models.families.gpt_oss import GptOss
from gangline_models.families.granite import Granite
from gangline_models.families.ministral import Ministral
from gangline_models.families.olmo import Olmo2, Olmo3
from gangline_models.families.phi3 import Phi3
from gangline_models.families.qwen2 import Qwen2
from gangline_models.families.qwen3_next import Qwen3Next
from gangline_models.families.smollm3 import SmolLM3
from gangline_models.mtp.config import PART as MTP
from gangline_models.mup.config import PART as MUP
from gangline_models.presets import PRESETS, SHAPES
from gangline_models.rope.parts import find_name

FAMILIES: dict[str, tuple[type[FamilyConfig], str]] = {
    "qwen2": (Qwen2, "Qwen2 and Qwen2.5: biases on queries, keys and values"),
    "ministral": (Ministral, "Ministral: a sliding window in some blocks"),
    "olmo2": (Olmo2, "OLMo 2: norms after attention and feed-forward"),
    "olmo3": (Olmo3, "OLMo 3: OLMo 2 with a sliding window in most blocks"),
    "smollm3": (SmolLM3, "SmolLM 3: every fourth block without rotary positions (NoPE)"),
    "phi3": (Phi3, "Phi 3 and Phi 4 mini: partial RoPE"),
    "granite": (Granite, "Granite 3: multipliers of embedding, residual stream, attention scores and logits"),
    "gemma2": (Gemma2, "Gemma 2: soft caps, norms before and after sublayers, a sliding window in every second block"),
    "gemma3": (Gemma3, "Gemma 3: QK norm, two RoPE bases"),
    "deepseek_v3": (DeepSeek, "DeepSeek-V3: multi-head latent attention (MLA); experts by gangline-moe"),
    "gpt_oss": (
        GptOss,
        "gpt-oss: attention sinks, a sliding window in every second block, clamped SwiGLU; experts by gangline-moe",
    ),
    "qwen3_next": (Qwen3Next, "Qwen3-Next: gated delta-rule layers and gated attention; experts by gangline-moe"),
    "gpt2": (Gpt2, "GPT-2: learned positions, LayerNorm, GELU, biases"),
}


def open_rope(config: type[FamilyConfig]) -> dict[str, str]:
    """Return {"rope": name of the default part of `model/rope`}; {} for families without rotary positions."""
    default: Any = config.__dataclass_fields__.get("rope")
    return {} if default is None else {"rope": find_name(default.default_factory())}


def make_part(name: str, config: type[FamilyConfig], summary: str) -> Part:
    """Return the part of a family or preset, built by the family's module. Presets inherit capabilities."""
    family = next(base for base in config.__mro__ if base in OWN)
    capabilities = {
        "pretrained": "gangline_models.hugging_face.pretrained:HuggingFace",
        "hugging_face": f"{family.__module__}:{family.__name__}Format",
    }
    return Part(
        name=name,
        config=config,
        build=f"{family.__module__}:build",
        summary=summary,
        opens=open_rope(config),
        capabilities=capabilities if family is config else {},
    )


OWN = {config for config, _ in FAMILIES.values()}
MODELS = (
    *(make_part(name, *offered) for name, offered in FAMILIES.items()),
    *(make_part(name, config, f"shape of {SHAPES[name][1]}") for name, config in PRESETS.items()),
)
EDITS = (MTP, MUP)
