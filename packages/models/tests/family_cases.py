"""Small models of each family as transformers configures them: odd sizes, and every option switched on."""

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

# name -> (transformers config class without "Config", its arguments)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", COMMON),
    "qwen2-tied-yarn": ("Qwen2", COMMON | {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-yarn-between-pairs": ("Qwen2", COMMON | {"rope_parameters": YARN | {"truncate": False}}),
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
    "gpt2-exact-gelu": (
        "GPT2",
        {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "activation_function": "gelu"},
    ),
}
LATENT: dict[str, Any] = COMMON | {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 5,
    "v_head_dim": 7,
    "rms_norm_eps": 1e-3,
}
CASES |= {
    "deepseek-v3-dense": ("DeepseekV3", LATENT),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        LATENT
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
}
NEXT: dict[str, Any] = COMMON | {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    "num_experts": 0,
    "rms_norm_eps": 1e-2,  # a smaller value amplifies rounding errors in the norm after a delta-rule layer
}
CASES |= {
    "qwen3-next-dense": ("Qwen3Next", NEXT),
    "qwen3-next-yarn": (
        "Qwen3Next",
        NEXT | {"attention_bias": True, "rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    ),
}
# Families whose feed-forwards are experts; they need gangline-moe.
ROUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": (
        "GptOss",
        COMMON
        | {
            "head_dim": 8,
            "intermediate_size": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "swiglu_limit": 1.5,
            "max_position_embeddings": 64,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT
        | {
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 12,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        NEXT
        | {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": False,
            "mlp_only_layers": [0, 2],
        },
    ),
}
# Decoders that core reads itself.
CORE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", COMMON | {"head_dim": 8}),
    "llama3": (
        "Llama",
        COMMON
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 5.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("Mistral", COMMON | {"sliding_window": 7}),
    "qwen3": (
        "Qwen3",
        COMMON | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
}
# Core's decoder with experts of gangline-moe.
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        "Qwen3Moe",
        COMMON
        | {
            "head_dim": 8,
            "moe_intermediate_size": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
        },
    ),
    "dots.llm1": (
        "Dots1",
        COMMON
        | {
            "head_dim": 8,
            "moe_intermediate_size": 12,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "norm_topk_prob": True,
        },
    ),
}
LENGTH = 48  # tokens per row when models are compared


def theirs(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the transformers model with random values in every parameter, large enough to affect the logits."""
    family, values = (CASES | ROUTED | CORE | SPARSE)[name]
    config = getattr(transformers, f"{family}Config")(**values, attn_implementation="eager")
    with torch.random.fork_rng():
        torch.manual_seed(3)  # transformers draws values with one number per head (A_log), and their mean is kept
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        biases = ((key, buffer) for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias"))
        for key, parameter in (*model.named_parameters(), *biases):
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale, middle = (0.2, 0.0) if parameter.dim() > 1 or "bias" in key else (0.3, float(parameter.mean()))
            parameter.copy_(drawn * scale + middle)
    return model
