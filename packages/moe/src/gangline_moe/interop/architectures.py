"""Hugging Face architectures with experts, as tables of config.json fields. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gangline_moe.routers.config import Biased, RouterConfig, Sigmoid, Softmax

LLAMA, QWEN = "LlamaForCausalLM", "Qwen3ForCausalLM"


@dataclass(frozen=True, kw_only=True)
class ExpertsArchitecture:
    """Hugging Face architecture with experts: fields of its config.json, their defaults, and its router.

    dense       architecture of the model without experts, whose part reads all other fields of config.json
    model_type  `model_type` in config.json; "": as in the model without experts
    title       name of the architecture in messages
    number      field with the number of experts
    read_as     accepted names of the field `number`: the first name that a file has is read
    width       field with the width of an expert
    silent      field to read -> default in transformers if a file lacks the field; None: the field is required
    nullable    fields for which null means the same as a missing field
    only        field -> values that gangline supports
    rest        fields to add to the config.json of the model without experts
    router      options class of the router, and the router's name in group `moe/router`
    everywhere  true if every block has experts and the weights of a token's experts add up to 1
    """

    name: str
    dense: str
    model_type: str = ""
    title: str = ""
    number: str
    read_as: tuple[str, ...]
    width: str = "moe_intermediate_size"
    silent: Mapping[str, Any]
    nullable: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)
    router: tuple[type[RouterConfig], str] = (Softmax, "softmax")
    everywhere: bool = False

    @property
    def scored(self) -> bool:
        """True if the router's scores are sigmoids with a balancing bias, and the layer has shared experts."""
        return self.router[0] is Sigmoid

    @property
    def gated(self) -> bool:
        """True if the shared expert has a gate."""
        return "shared_expert_intermediate_size" in self.silent


MIXTRAL = ExpertsArchitecture(  # no QK norm
    name="MixtralForCausalLM",
    dense=LLAMA,
    model_type="mixtral",
    number="num_local_experts",
    read_as=("num_local_experts", "num_experts"),
    width="intermediate_size",
    silent={
        **{"num_hidden_layers": 32, "num_experts_per_tok": 2, "num_local_experts": 8},
        **{"intermediate_size": 14336},
    },
    rest={"rms_norm_eps": 1e-5, "rope_theta": 1e6},  # defaults of Mixtral, which differ from those of Llama
    everywhere=True,
)
QWEN_MOE = ExpertsArchitecture(
    name="Qwen3MoeForCausalLM",
    dense=QWEN,
    model_type="qwen3_moe",
    number="num_experts",
    read_as=("num_experts", "num_local_experts"),
    silent={
        **{"num_hidden_layers": 24, "num_experts_per_tok": 8, "num_experts": 128, "moe_intermediate_size": 768},
        **{"norm_topk_prob": False, "decoder_sparse_step": 1},
    },
)
DOTS = ExpertsArchitecture(  # Qwen3 with the MoE layers of DeepSeek-V3
    name="Dots1ForCausalLM",
    dense=QWEN,
    model_type="dots1",
    title="dots.llm1",
    number="n_routed_experts",
    read_as=("n_routed_experts", "num_local_experts"),
    silent={
        **{"num_hidden_layers": 62, "num_experts_per_tok": None, "n_routed_experts": None},
        **{"moe_intermediate_size": 1408, "n_shared_experts": 0, "first_k_dense_replace": 0},
        **{"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    },
    nullable=frozenset(("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group")),
    only={"moe_layer_freq": (1,), "scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)},
    router=(Sigmoid, "sigmoid"),
)
GPT_OSS = ExpertsArchitecture(  # experts with biases, clamped gate and clamped up-projection
    name="GptOssForCausalLM",
    dense="GptOssForCausalLM",
    number="num_local_experts",
    read_as=("num_experts", "num_local_experts"),
    width="intermediate_size",
    silent={"num_experts_per_tok": 4, "num_local_experts": 128, "intermediate_size": 2880},
    rest={"num_local_experts": 0},
    router=(Biased, "biased"),
    everywhere=True,
)
DEEPSEEK = ExpertsArchitecture(  # the model without experts has dense blocks only
    name="DeepseekV3ForCausalLM",
    dense="DeepseekV3ForCausalLM",
    number="n_routed_experts",
    read_as=("num_local_experts", "n_routed_experts"),
    silent={
        **{"num_hidden_layers": 61, "num_experts_per_tok": 8, "n_routed_experts": 256},
        **{"moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3},
        **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    },
    router=(Sigmoid, "sigmoid"),
)
QWEN_NEXT = ExpertsArchitecture(
    name="Qwen3NextForCausalLM",
    dense="Qwen3NextForCausalLM",
    title="Qwen3-Next",
    number="num_experts",
    read_as=("num_experts",),
    silent={
        **{"num_hidden_layers": 48, "num_experts_per_tok": 10, "num_experts": 512, "moe_intermediate_size": 512},
        **{"shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1},
    },
    rest={"num_experts": 0},
)
ARCHITECTURES = (MIXTRAL, QWEN_MOE, DOTS, GPT_OSS, DEEPSEEK, QWEN_NEXT)
