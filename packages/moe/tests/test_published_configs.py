"""Published config.json files of all supported architectures with experts, read field by field.

Architectures that need another package are left out.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gangline.errors import UserError
from gangline_models.hugging_face.config import read_edited_config

# Fields of config.json files on the Hugging Face hub, besides sizes; each value is from a published file.
COMMON: dict[str, Any] = {
    **{"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True},
    **{"attention_dropout": 0.0, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "rms_norm_eps": 1e-5},
}
LLAMA = COMMON | {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False},
    **{"pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False},
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": LLAMA
    | {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
        **{"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 5e5},
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 8192,
        },
    },
    "TinyLlama-1.1B": LLAMA
    | {
        **{"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_hidden_layers": 22},
        **{"num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "rope_theta": 10000.0},
    },
    "SmolLM2-135M": LLAMA
    | {
        **{"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_hidden_layers": 30},
        **{"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000},
        **{"tie_word_embeddings": True, "is_llama_config": True, "rope_interleaved": False, "pad_token_id": 2},
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "Mistral-7B-v0.1": COMMON
    | {
        **{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096},
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
        **{"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    },
    "Mixtral-8x7B-v0.1": COMMON
    | {
        **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None},
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
        **{"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 1e6},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
        **{"router_aux_loss_coef": 0.02, "tie_word_embeddings": False},
    },
    "Qwen3-0.6B": COMMON
    | {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128},
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28},
        **{"num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000},
        **{"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None},
        "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": COMMON
    | {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False},
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_hidden_layers": 48},
        **{"num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6},
        **{"head_dim": 128, "max_window_layers": 48, "sliding_window": None, "use_sliding_window": False},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True},
        **{"num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False},
        **{"router_aux_loss_coef": 0.001, "rope_scaling": None, "tie_word_embeddings": False},
    },
    "dots.llm1": COMMON
    | {
        **{"architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "attention_bias": False},
        **{"hidden_size": 4096, "intermediate_size": 10944, "num_attention_heads": 32, "num_hidden_layers": 62},
        **{"num_key_value_heads": 32, "vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1e7},
        **{"first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_routed_experts": 128},
        **{"n_shared_experts": 2, "n_group": None, "topk_group": None, "norm_topk_prob": True},
        **{"num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "scoring_func": "noaux_tc"},
        **{"topk_method": "noaux_tc", "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "pretraining_tp": 1},
        **{"max_window_layers": 62, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None},
        "tie_word_embeddings": False,
    },
}
SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "layers",
    "vocab_size": "vocab_size",
}


def read(name, tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | changes))
    return read_edited_config(tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_json_is_read(name, tmp_path):
    model, edits = read(name, tmp_path)
    said = PUBLISHED[name]
    assert {ours: getattr(model, ours) for ours in SIZES.values()} == {
        ours: said[theirs] for theirs, ours in SIZES.items()
    }
    assert model.rope_theta == said["rope_theta"]
    experts = said.get("num_local_experts") or said.get("num_experts") or said.get("n_routed_experts")
    assert [edit.experts for edit in edits] == ([experts] if experts else [])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("SmolLM2-135M", {"rope_interleaved": True}),
        ("dots.llm1", {"scoring_func": "softmax"}),
        ("dots.llm1", {"topk_method": "greedy"}),
        ("dots.llm1", {"moe_layer_freq": 2}),
    ],
)
def test_unsupported_field_value_is_refused_by_name(name, changes, tmp_path):
    ((field, value),) = changes.items()
    with pytest.raises(UserError, match=f"{field}={value}"):
        read(name, tmp_path, **changes)
