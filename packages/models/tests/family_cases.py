"""Small models of each family as transformers configures them: odd sizes, and everything switched on."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
PARTIAL = {"partial_rotary_factor": 0.7, "rope_theta": 1e4}
LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.3],
        "long_factor": [1.5, 2.0, 4.0],
        "rope_theta": 1e4,
    },
}

# name -> (their class of configuration without "Config", what it is given)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", COMMON),
    "qwen2-tied-yarn": ("Qwen2", COMMON | {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-windows": ("Qwen2", COMMON | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-linear": (
        "Qwen2",
        COMMON | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "qwen2-dynamic": (
        "Qwen2",
        COMMON
        | {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "ministral": ("Ministral", COMMON | {"sliding_window": 7, "head_dim": 10}),
    "olmo2": ("Olmo2", COMMON),
    "olmo2-mha-tied": ("Olmo2", COMMON | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", COMMON | {"num_hidden_layers": 4, "sliding_window": 6}),
    "olmo3-yarn": (
        "Olmo3",
        COMMON
        | {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "smollm3": ("SmolLM3", COMMON | {"num_hidden_layers": 5}),
    "phi3": ("Phi3", COMMON | {"sliding_window": 9}),
    "phi3-partial": ("Phi3", COMMON | {"rope_parameters": {"rope_type": "default", **PARTIAL}}),
    "phi3-longrope": ("Phi3", COMMON | LONG | {"original_max_position_embeddings": 16}),
    "phi3-longrope-short": ("Phi3", COMMON | LONG | {"original_max_position_embeddings": 50}),
    "granite": (
        "Granite",
        COMMON
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.7,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": (
        "Gemma2",
        COMMON
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 12,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        COMMON
        | {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "query_pre_attn_scalar": 12,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 52},
    ),
}
LENGTH = 48  # of the rows that the models are compared on


def theirs(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Their model with random numbers in every parameter, biases and norms too, large enough that each counts."""
    family, values = CASES[name]
    config = getattr(transformers, f"{family}Config")(**values, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale, middle = (0.2, 0.0) if parameter.dim() > 1 or "bias" in key else (0.3, float(parameter.mean()))
            parameter.copy_(drawn * scale + middle)
    return model
