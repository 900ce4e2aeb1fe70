"""What others call a layer with experts, and the config.json of models that have them. Torch-free.

Mixtral      softmax, weights that add up to 1, experts in every block, no norm of queries and keys
Qwen3-MoE    softmax, some blocks may stay dense, norm of queries and keys
dots.llm1    the feed-forward of DeepSeek-V3 (its names, too) behind grouped-query attention with such norms
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gangline import Problem, UserError
from gangline.model import Name
from gangline_moe.routers.config import Grouped, Sigmoid, Softmax

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_moe.config import MoeOptions

Options = TypeVar("Options", bound="MoeOptions")
MIXTRAL, QWEN, DOTS = "MixtralForCausalLM", "Qwen3MoeForCausalLM", "Dots1ForCausalLM"
LLAMA, QWEN_DENSE = "LlamaForCausalLM", "Qwen3ForCausalLM"


def others_names(place: str, options: MoeOptions, qk_norm: bool) -> tuple[Name, ...]:
    """The names of a layer's arrays at `place` ("blocks.*.feed_forward")."""
    theirs = "model.layers.{0}.mlp"
    words = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}
    if _is_mixtral(options) and not qk_norm:
        theirs, words = "model.layers.{0}.block_sparse_moe", {"w_gate": "w1", "w_up": "w3", "w_down": "w2"}
    found = [Name(f"{place}.router.gate.weight", f"{theirs}.gate.weight")]
    found += [
        Name(f"{place}.experts.{o}.weight", f"{theirs}.experts.{{n}}.{t}.weight", "stack") for o, t in words.items()
    ]
    if options.shared:
        shared = f"{theirs}.shared_experts"
        found += [Name(f"{place}.shared.{o}.weight", f"{shared}.{t}.weight") for o, t in words.items()]
    if options.router.bias_rate:
        found.append(Name(f"{place}.router.bias", f"{theirs}.gate.e_score_correction_bias"))
    if options.router.step_loss:
        found.append(Name(f"{place}.router.share", ""))
    return tuple(found)


def _is_softmax(options: MoeOptions) -> bool:
    """Softmax as Mixtral and Qwen have it: no bias, no shared expert, nothing dropped."""
    plain = isinstance(options.router, Softmax) and not options.router.bias_rate
    return plain and not options.shared and options.capacity_factor is None


def _is_mixtral(options: MoeOptions) -> bool:
    router = options.router
    everywhere = options.first == 0 and options.every == 1
    return _is_softmax(options) and everywhere and isinstance(router, Softmax) and router.renormalise


def to_hugging_face(options: MoeOptions, config: dict[str, Any]) -> dict[str, Any] | None:
    """The config.json of `config`'s model with these experts; None: no architecture is known for it."""
    router, dense = options.router, config["architectures"][0]
    hidden = options.hidden or max(1, config["intermediate_size"] // options.top_k)
    each = {"num_experts_per_tok": options.top_k, "router_aux_loss_coef": router.step_loss}
    if dense == LLAMA and _is_mixtral(options):
        more = {"num_local_experts": options.experts, "sliding_window": None, "intermediate_size": hidden}
        return {**config, "architectures": [MIXTRAL], "model_type": "mixtral", **each, **more}
    if dense != QWEN_DENSE or config.get("use_sliding_window"):  # their experts stand behind attention without windows
        return None
    config = {key: value for key, value in config.items() if key != "layer_types"}
    each["moe_intermediate_size"] = hidden
    if _is_softmax(options):
        assert isinstance(router, Softmax)
        layers = range(config["num_hidden_layers"])
        kept = [i for i in layers if i < options.first or (i - options.first) % options.every]
        more = {"num_experts": options.experts, "norm_topk_prob": router.renormalise}
        more |= {"decoder_sparse_step": 1, "mlp_only_layers": kept}
        return {**config, "architectures": [QWEN], "model_type": "qwen3_moe", **each, **more}
    if not isinstance(router, Sigmoid) or not options.shared or options.every != 1 or not router.bias_rate:
        return None
    if options.capacity_factor is not None:
        return None
    groups = (router.groups, router.top_groups) if isinstance(router, Grouped) else (1, 1)
    more = {"n_routed_experts": options.experts, "n_shared_experts": options.shared}
    more |= {"first_k_dense_replace": options.first, "n_group": groups[0], "topk_group": groups[1]}
    more |= {"norm_topk_prob": router.renormalise, "routed_scaling_factor": router.scale, "sliding_window": None}
    return {**config, "architectures": [DOTS], "model_type": "dots1", **each, **more}


def of_hugging_face(cls: type[Options], config: dict[str, Any]) -> tuple[Options, dict[str, Any]] | None:
    """The options that make the model of `config`, and the config.json of the model without experts; None: not ours.

    Raises UserError for windows of attention and for blocks with experts that `first` and `every` cannot name.
    """
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in (MIXTRAL, QWEN, DOTS):
        return None
    if config.get("sliding_window") is not None:
        what = f"a model of experts with sliding_window={config['sliding_window']}."
        raise UserError(what, "gangline reads windows of models without experts only.")
    silent = architecture == DOTS and "sliding_window" not in config
    if silent and config["num_hidden_layers"] > config.get("max_window_layers", 62):
        what = "a dots.llm1 whose config.json does not give sliding_window."
        raise UserError(what, "transformers takes 4096, and gangline reads windows of models without experts only.")
    top_k = config["num_experts_per_tok"]
    if architecture == MIXTRAL:
        found = cls(experts=config["num_local_experts"], top_k=top_k, hidden=config["intermediate_size"])
        absent = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}  # what transformers takes for it, and not for a Llama
        return replace(found, router=Softmax()), {**absent, **config, "architectures": [LLAMA]}
    rest = {**config, "architectures": [QWEN_DENSE]}
    if config.get("head_dim") is None and "hidden_size" in config:  # not Qwen3's 128
        rest["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    hidden = config["moe_intermediate_size"]
    if architecture == QWEN:
        experts = config["num_experts" if "num_experts" in config else "num_local_experts"]
        first, every = _sparse(config)
        router = Softmax(renormalise=config.get("norm_topk_prob", False))
        return cls(experts=experts, top_k=top_k, hidden=hidden, first=first, every=every, router=router), rest
    experts = config["n_routed_experts" if "n_routed_experts" in config else "num_local_experts"]
    scores = {"renormalise": config.get("norm_topk_prob", False), "scale": config.get("routed_scaling_factor", 1.0)}
    groups = config.get("n_group") or 1
    scored = Sigmoid(**scores) if groups == 1 else Grouped(**scores, groups=groups, top_groups=config["topk_group"])
    first, shared = config.get("first_k_dense_replace") or 0, config.get("n_shared_experts") or 0
    return cls(experts=experts, top_k=top_k, hidden=hidden, first=first, shared=shared, router=scored), rest


def _sparse(config: dict[str, Any]) -> tuple[int, int]:
    """(first, every) of Qwen's decoder_sparse_step and mlp_only_layers. Raises UserError where no such two say it."""
    step, kept = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    layers = range(config["num_hidden_layers"])
    sparse = [i for i in layers if (i + 1) % step == 0 and i not in kept]
    for first in sparse[:1]:
        every = sparse[1] - first if len(sparse) > 1 else len(layers)
        if sparse == list(layers)[first::every]:
            return first, 1 if len(sparse) == 1 and first == len(layers) - 1 else every
    raise UserError("a model whose blocks with experts are not evenly spaced.", "moe.first and moe.every say no such.")


def weight_problems(options: MoeOptions, run: Run) -> list[Problem]:
    """Whether the experts of the directory in `model.weights` are these."""
    from gangline.config import holds_checkpoint
    from gangline.model import read_config

    directory = run.model.pretrained()
    if directory is None or holds_checkpoint(run):
        return []
    try:
        found = of_hugging_face(type(options), read_config(directory))
    except UserError as error:
        return [Problem(f"model.weights={directory} holds {error.what}", *error.details[:2])]
    if found is None:
        return [Problem(f"model.weights={directory} holds a model without experts.", "", "moe=off")]
    hidden = options.hidden or max(1, (options.dense_hidden(run) or 0) // options.top_k)
    here = {name: getattr(options, name) for name in ("experts", "top_k", "shared", "first", "every")}
    there = {name: getattr(found[0], name) for name in here} | {"hidden": found[0].hidden}
    here["hidden"] = hidden
    here |= _computed(options)
    there |= _computed(found[0])
    other = [f"moe.{n} is {there.get(n)} there and {v} here" for n, v in here.items() if v != there.get(n)]
    if not other:
        return []
    mend = f"gangline import {directory} prints the configuration that fits it."
    return [Problem(f"model.weights={directory} holds other experts.", "; ".join(other) + ".", mend)]


def _computed(options: MoeOptions) -> dict[str, Any]:
    """What the router computes, without what only training sees."""
    router = options.router
    names = [item.name for item in fields(router) if item.name in ("renormalise", "scale", "groups", "top_groups")]
    return {"router": type(router).__name__} | {f"router.{name}": getattr(router, name) for name in names}
