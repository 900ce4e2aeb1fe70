"""What others call a layer with experts, and the config.json of models that have them. Torch-free.

Mixtral      softmax, weights that add up to 1, experts in every block, no norm of queries and keys
Qwen3-MoE    softmax, some blocks may stay dense, norm of queries and keys
gpt-oss      softmax with a bias, biases of experts, bounded products; the rest of it is a model's that knows the name
DeepSeek-V3  sigmoid out of groups, shared experts, the first blocks dense; the rest as with gpt-oss
Qwen3-Next   softmax, a shared expert with a gate, some blocks may stay dense; the rest as with gpt-oss
dots.llm1    the feed-forward of DeepSeek-V3 (its names, too) behind grouped-query attention with such norms
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gangline import Problem, UserError
from gangline.config import NonNegativeInt, PositiveInt
from gangline.config.fields import stated
from gangline.plan import Name
from gangline_models.hugging_face.fields import checked
from gangline_moe.routers.config import Biased, Grouped, Sigmoid, Softmax

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_moe.config import MoeOptions

Options = TypeVar("Options", bound="MoeOptions")
MIXTRAL, QWEN, DOTS = "MixtralForCausalLM", "Qwen3MoeForCausalLM", "Dots1ForCausalLM"
GPT_OSS = "GptOssForCausalLM"  # its dense form, which nobody has: the same with NO_EXPERTS
DEEPSEEK = "DeepseekV3ForCausalLM"  # with as many dense blocks as there are
QWEN_NEXT = "Qwen3NextForCausalLM"  # with 0 experts
# What transformers has where a file is silent; of dots.llm1 it has no number of experts.
LAYERS, TOP_K, EXPERTS = {MIXTRAL: 32, QWEN: 24, DOTS: 62}, {MIXTRAL: 2, QWEN: 8}, "n_routed_experts"
# Of experts: who reads the rest of a config.json knows nothing of them. Losses and noise are of training alone.
ROUTING = (
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
    *("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size"),
    *("router_aux_loss_coef", "router_jitter_noise", "output_router_logits"),
)
# Of dots.llm1: the values that say what is computed here, and what is of training alone.
DOTS_ONLY = {"moe_layer_freq": (1,), "scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)}
DOTS_TRAINING = ("aux_loss_alpha", "seq_aux", "ep_size")
NO_EXPERTS = {"num_local_experts": 0}
LLAMA, QWEN_DENSE = "LlamaForCausalLM", "Qwen3ForCausalLM"


def list_names(place: str, options: MoeOptions, qk_norm: bool, biased: Sequence[str] = ()) -> tuple[Name, ...]:
    """The names of a layer's arrays at `place` ("blocks.*.feed_forward"). biased: products of experts with a bias."""
    if biased:
        return _gpt_oss_names(place, options)
    theirs = "model.layers.{0}.mlp"
    words = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}
    if _is_mixtral(options) and not qk_norm:
        theirs, words = "model.layers.{0}.block_sparse_moe", {"w_gate": "w1", "w_up": "w3", "w_down": "w2"}
    found = [Name(f"{place}.router.gate.weight", f"{theirs}.gate.weight")]
    found += [
        Name(f"{place}.experts.{o}.weight", f"{theirs}.experts.{{n}}.{t}.weight", "stack") for o, t in words.items()
    ]
    if options.shared:
        shared = f"{theirs}.shared_expert" + ("" if options.shared_gate else "s")
        found += [Name(f"{place}.shared.{o}.weight", f"{shared}.{t}.weight") for o, t in words.items()]
    if options.shared_gate:
        found.append(Name(f"{place}.shared_gate.weight", f"{theirs}.shared_expert_gate.weight"))
    if options.router.bias_rate:
        found.append(Name(f"{place}.router.bias", f"{theirs}.gate.e_score_correction_bias"))
    if options.router.step_loss:
        found.append(Name(f"{place}.router.share", ""))
    return tuple(found)


def _gpt_oss_names(place: str, options: MoeOptions) -> tuple[Name, ...]:
    """Experts stacked and transposed, the columns of gate and up-projection in turns."""
    hidden, theirs = 2 * (options.hidden or 0), "model.layers.{0}.mlp"
    found = [Name(f"{place}.router.gate.{leaf}", f"{theirs}.router.{leaf}") for leaf in ("weight", "bias")]
    for first, name in enumerate(("w_gate", "w_up")):
        ours, both, rows = f"{place}.experts.{name}", f"{theirs}.experts.gate_up_proj", (first, hidden)
        found.append(Name(f"{ours}.weight", both, "transpose", rows, every=2, dim=1))
        found.append(Name(f"{ours}.bias", f"{both}_bias", "same", rows, every=2, dim=1))
    found.append(Name(f"{place}.experts.w_down.weight", f"{theirs}.experts.down_proj", "transpose"))
    found.append(Name(f"{place}.experts.w_down.bias", f"{theirs}.experts.down_proj_bias"))
    return (*found, *([Name(f"{place}.router.share", "")] if options.router.step_loss else []))


def _is_softmax(options: MoeOptions) -> bool:
    """Softmax as Mixtral and Qwen have it: no bias, no shared expert, nothing dropped."""
    plain = type(options.router) is Softmax and not options.router.bias_rate
    return plain and not options.shared and options.capacity_factor is None


def _is_mixtral(options: MoeOptions) -> bool:
    router = options.router
    everywhere = options.first == 0 and options.every == 1
    return _is_softmax(options) and everywhere and isinstance(router, Softmax) and router.renormalise


def to_hugging_face(options: MoeOptions, config: dict[str, Any]) -> dict[str, Any] | None:
    """The config.json of `config`'s model with these experts; None: no architecture is known for it."""
    router, dense = options.router, config["architectures"][0]
    hidden = options.hidden or max(1, config["intermediate_size"] // options.top_k)
    each: dict[str, Any] = {"num_experts_per_tok": options.top_k, "router_aux_loss_coef": router.step_loss}
    if dense == LLAMA and _is_mixtral(options):
        more = {"num_local_experts": options.experts, "sliding_window": None, "intermediate_size": hidden}
        return {**config, "architectures": [MIXTRAL], "model_type": "mixtral", **each, **more}
    if dense == GPT_OSS:
        plain = options.first == 0 and options.every == 1 and not options.shared and options.capacity_factor is None
        if not plain or type(router) is not Biased or not router.renormalise or router.bias_rate:
            return None
        return {**config, **each, "num_local_experts": options.experts, "intermediate_size": hidden}
    if dense == QWEN_NEXT:
        return _qwen_next_json(options, config | each, hidden)
    if dense == DEEPSEEK:
        told = _sigmoid_json(options)
        return None if told is None else {**config, **each, "moe_intermediate_size": hidden, **told}
    if dense != QWEN_DENSE or config.get("use_sliding_window"):  # their experts stand behind attention without windows
        return None
    config = {key: value for key, value in config.items() if key != "layer_types"}
    each["moe_intermediate_size"] = hidden
    if _is_softmax(options):
        assert isinstance(router, Softmax)
        more = {"num_experts": options.experts, "norm_topk_prob": router.renormalise, **_sparse_json(options, config)}
        return {**config, "architectures": [QWEN], "model_type": "qwen3_moe", **each, **more}
    if (told := _sigmoid_json(options)) is None:
        return None
    return {**config, "architectures": [DOTS], "model_type": "dots1", **each, **told, "sliding_window": None}


def missing(options: MoeOptions, config: dict[str, Any]) -> list[str]:
    """What to set for others to have these experts in the model of `config`; nothing where no setting makes it so."""
    router, dense = options.router, config["architectures"][0]
    if dense not in (LLAMA, GPT_OSS, QWEN_NEXT, DEEPSEEK, QWEN_DENSE):
        return []
    scored = dense == DEEPSEEK or (dense == QWEN_DENSE and isinstance(router, Sigmoid))
    kind, name = (Biased, "biased") if dense == GPT_OSS else (Softmax, "softmax")
    fits = isinstance(router, Sigmoid) if scored else type(router) is kind
    everywhere, gated = dense in (LLAMA, GPT_OSS), dense == QWEN_NEXT
    shared, biased = scored or gated, bool(router.bias_rate)
    said = {
        f"moe/router={'sigmoid' if scored else name}": fits,
        "moe.router.renormalise=true": not fits or not everywhere or getattr(router, "renormalise", False),
        f"moe.router.bias_rate={0.001 if scored else 0}": not fits or biased == scored,
        "moe.first=0": not everywhere or options.first == 0,
        "moe.every=1": not (everywhere or scored) or options.every == 1,
        f"moe.shared={int(shared)}": bool(options.shared) == shared,
        f"moe.shared_gate={str(gated).lower()}": options.shared_gate == gated,
        "moe.capacity_factor=null": options.capacity_factor is None,
        "model.window=null": dense != QWEN_DENSE or not config.get("use_sliding_window"),
    }
    return [word for word, holds in said.items() if not holds]


def _sparse_json(options: MoeOptions, config: dict[str, Any]) -> dict[str, Any]:
    """Which blocks have experts, as Qwen says it."""
    layers = range(config["num_hidden_layers"])
    kept = [i for i in layers if i < options.first or (i - options.first) % options.every]
    return {"decoder_sparse_step": 1, "mlp_only_layers": kept}


def _qwen_next_json(options: MoeOptions, config: dict[str, Any], hidden: int) -> dict[str, Any] | None:
    router = options.router
    if type(router) is not Softmax or router.bias_rate or options.capacity_factor is not None:
        return None
    if not options.shared or not options.shared_gate:
        return None
    more = {"num_experts": options.experts, "norm_topk_prob": router.renormalise, "moe_intermediate_size": hidden}
    more["shared_expert_intermediate_size"] = options.shared * hidden
    return {**config, **more, **_sparse_json(options, config)}


def _sigmoid_json(options: MoeOptions) -> dict[str, Any] | None:
    """What DeepSeek-V3 and dots.llm1 say of their experts; None: these are others."""
    router = options.router
    if not isinstance(router, Sigmoid) or not options.shared or options.every != 1 or not router.bias_rate:
        return None
    if options.capacity_factor is not None or options.shared_gate:
        return None
    groups = (router.groups, router.top_groups) if isinstance(router, Grouped) else (1, 1)
    more = {"n_routed_experts": options.experts, "n_shared_experts": options.shared}
    more |= {"first_k_dense_replace": options.first, "n_group": groups[0], "topk_group": groups[1]}
    return more | {"norm_topk_prob": router.renormalise, "routed_scaling_factor": router.scale}


def parse_config(cls: type[Options], config: dict[str, Any]) -> tuple[Options, dict[str, Any]] | None:
    """The options that make the model of `config`, and the config.json of the model without experts; None: not ours.

    Raises UserError for windows of attention and for blocks with experts that `first` and `every` cannot name.
    """
    architecture = (config.get("architectures") or [None])[0]
    if architecture == GPT_OSS:
        return _gpt_oss(cls, config)
    if architecture == DEEPSEEK:
        return _deepseek(cls, config)
    if architecture == QWEN_NEXT:
        return _qwen_next(cls, config)
    if architecture not in (MIXTRAL, QWEN, DOTS):
        return None
    layers = _read_field(config, "num_hidden_layers", LAYERS[architecture], PositiveInt)
    if config.get("sliding_window") is not None:
        what = f"a model of experts with sliding_window={config['sliding_window']}."
        raise UserError(what, "gangline reads windows of models without experts only.")
    silent = architecture == DOTS and "sliding_window" not in config
    if silent and layers > _read_field(config, "max_window_layers", 62, NonNegativeInt):
        what = "a dots.llm1 whose config.json does not give sliding_window."
        raise UserError(what, "transformers takes 4096, and gangline reads windows of models without experts only.")
    ranges = stated(cls)
    top_k = _read_field(config, "num_experts_per_tok", TOP_K.get(architecture), ranges["top_k"])
    rest = {name: value for name, value in config.items() if name not in ROUTING}
    if architecture == MIXTRAL:
        named = "num_local_experts" if "num_local_experts" in config else "num_experts"
        experts = _read_field(config, named, 8, ranges["experts"])
        found = cls(experts=experts, top_k=top_k, hidden=_read_field(config, "intermediate_size", 14336, PositiveInt))
        absent = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}  # what transformers takes for it, and not for a Llama
        return replace(found, router=Softmax()), {**absent, **rest, "architectures": [LLAMA]}
    rest["architectures"] = [QWEN_DENSE]
    if config.get("head_dim") is None and None not in map(config.get, ("hidden_size", "num_attention_heads")):
        width, heads = (_read_field(config, name, None, PositiveInt) for name in ("hidden_size", "num_attention_heads"))
        rest["head_dim"] = width // heads  # not Qwen3's 128
    if architecture == QWEN:
        experts = _read_field(
            config, "num_experts" if "num_experts" in config else "num_local_experts", 128, PositiveInt
        )
        hidden = _read_field(config, "moe_intermediate_size", 768, PositiveInt)
        first, every = _sparse(config | {"num_hidden_layers": layers})
        router = Softmax(renormalise=_read_field(config, "norm_topk_prob", False, bool))
        return cls(experts=experts, top_k=top_k, hidden=hidden, first=first, every=every, router=router), rest
    rest = {name: value for name, value in rest.items() if name not in DOTS_ONLY and name not in DOTS_TRAINING}
    for name, values in DOTS_ONLY.items():
        if config.get(name, values[0]) not in (*values, None):
            what = f"a dots.llm1 with {name}={config[name]}."
            raise UserError(what, f"gangline has only {name}={' or '.join(map(str, values))} there.")
    named = "num_local_experts" if "n_routed_experts" not in config and "num_local_experts" in config else EXPERTS
    experts = _read_field(config, named, None, ranges["experts"])
    absent = {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    groups = {name: 1 for name in ("n_group", "topk_group") if config.get(name) is None}  # null in published files
    scored = _parse_sigmoid(config | groups, experts, absent)
    hidden = _read_field(config, "moe_intermediate_size", 1408, PositiveInt)
    first, shared = (
        0 if config.get(name) is None else _read_field(config, name, 0, NonNegativeInt)
        for name in ("first_k_dense_replace", "n_shared_experts")
    )
    return cls(experts=experts, top_k=top_k, hidden=hidden, first=first, shared=shared, router=scored), rest


def _gpt_oss(cls: type[Options], config: dict[str, Any]) -> tuple[Options, dict[str, Any]] | None:
    """The same of a gpt-oss; what it has beside experts stays in its config.json."""
    rest = {name: value for name, value in config.items() if name not in ROUTING}
    named = "num_experts" if "num_experts" in config else "num_local_experts"
    if not (experts := _read_field(config, named, 128, NonNegativeInt)):
        return None
    top_k = _read_field(config, "num_experts_per_tok", 4, PositiveInt)
    hidden = _read_field(config, "intermediate_size", 2880, PositiveInt)
    return cls(experts=experts, top_k=top_k, hidden=hidden, router=Biased()), rest | NO_EXPERTS


def _deepseek(cls: type[Options], config: dict[str, Any]) -> tuple[Options, dict[str, Any]] | None:
    """The same of a DeepSeek-V3; None where all its blocks are dense."""
    layers = _read_field(config, "num_hidden_layers", 61, PositiveInt)
    first = _read_field(config, "first_k_dense_replace", 3, NonNegativeInt)
    if first >= layers:
        return None
    experts = _read_field(config, "num_local_experts" if "num_local_experts" in config else EXPERTS, 256, PositiveInt)
    absent = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
    found = cls(
        experts=experts,
        top_k=_read_field(config, "num_experts_per_tok", 8, PositiveInt),
        hidden=_read_field(config, "moe_intermediate_size", 2048, PositiveInt),
        shared=_read_field(config, "n_shared_experts", 1, NonNegativeInt),
        first=first,
        router=_parse_sigmoid(config, experts, absent),
    )
    rest = {name: value for name, value in config.items() if name not in ROUTING}
    return found, rest | {"first_k_dense_replace": layers}


def _qwen_next(cls: type[Options], config: dict[str, Any]) -> tuple[Options, dict[str, Any]] | None:
    """The same of a Qwen3-Next; None where no block of it has experts."""
    layers = config | {"num_hidden_layers": _read_field(config, "num_hidden_layers", 48, PositiveInt)}
    if not (experts := _read_field(config, "num_experts", 512, NonNegativeInt)) or not _sparse_blocks(layers):
        return None
    hidden = _read_field(config, "moe_intermediate_size", 512, PositiveInt)
    beside = _read_field(config, "shared_expert_intermediate_size", 512, NonNegativeInt)
    if beside % hidden or not beside:
        what = f"a Qwen3-Next with shared_expert_intermediate_size={beside}."
        raise UserError(what, f"gangline has shared experts as wide as the others, moe_intermediate_size={hidden}.")
    first, every = _sparse(layers)
    found = cls(
        experts=experts,
        top_k=_read_field(config, "num_experts_per_tok", 10, PositiveInt),
        hidden=hidden,
        shared=beside // hidden,
        shared_gate=True,
        first=first,
        every=every,
        router=Softmax(renormalise=_read_field(config, "norm_topk_prob", True, bool)),
    )
    rest = {name: value for name, value in config.items() if name not in ROUTING}
    return found, rest | {"num_experts": 0}


def _parse_sigmoid(config: dict[str, Any], experts: int, absent: dict[str, Any]) -> Sigmoid:
    """Return the router of DeepSeek-V3's fields. absent: what transformers has for a field that is not there.

    Raises UserError for groups that do not divide the experts.
    """
    scores = {
        "renormalise": _read_field(config, "norm_topk_prob", absent["norm_topk_prob"], bool),
        "scale": _read_field(
            config, "routed_scaling_factor", absent["routed_scaling_factor"], stated(Sigmoid)["scale"]
        ),
    }
    groups, top = (_read_field(config, name, absent[name], PositiveInt) for name in ("n_group", "topk_group"))
    if groups == 1:
        return Sigmoid(**scores)
    if experts % groups or experts // groups < 2:
        why = f"It has {experts} experts, which must divide into n_group groups of two and more."
        raise UserError(f"a model with n_group={groups}.", why)
    if top > groups:
        raise UserError(f"a model with topk_group={top}.", f"It must be at most n_group={groups}.")
    return Grouped(**scores, groups=groups, top_groups=top)


def _read_field(config: dict[str, Any], name: str, absent: Any, hint: Any) -> Any:
    """The field, or `absent` where there is none. hint: its type and range.

    Raises UserError for null, for a value that does not fit, and for a missing field where `absent` is None.
    """
    if (found := config.get(name, absent)) is not None:
        return checked(name, found, hint)
    if name in config:
        raise UserError(f"a model with {name}=null.", "transformers has no meaning for that.")
    raise UserError(f"a model whose config.json does not give {name}.", "transformers has no default for it.")


def _sparse(config: dict[str, Any]) -> tuple[int, int]:
    """(first, every) of Qwen's decoder_sparse_step and mlp_only_layers. Raises UserError where no such two say it."""
    layers, sparse = range(config["num_hidden_layers"]), _sparse_blocks(config)
    for first in sparse[:1]:
        every = sparse[1] - first if len(sparse) > 1 else len(layers)
        if sparse == list(layers)[first::every]:
            return first, 1 if len(sparse) == 1 and first == len(layers) - 1 else every
    said = {name: config.get(name) for name in ("num_hidden_layers", "decoder_sparse_step", "mlp_only_layers")}
    shown = ", ".join(f"{name}={value}" for name, value in said.items())
    why = f"moe.first and moe.every cannot describe these blocks: {shown}."
    raise UserError("a model whose blocks with experts are not evenly spaced.", why)


def _sparse_blocks(config: dict[str, Any]) -> list[int]:
    step = _read_field(config, "decoder_sparse_step", 1, PositiveInt)
    kept = set(checked("mlp_only_layers", config.get("mlp_only_layers"), list[int] | None) or ())
    return [i for i in range(config["num_hidden_layers"]) if (i + 1) % step == 0 and i not in kept]


def weight_problems(options: MoeOptions, run: Run) -> list[Problem]:
    """Whether the experts of the directory in `model.weights` are these."""
    from gangline.run.directory import holds_checkpoint
    from gangline_models.hugging_face.config import read_config

    directory = run.model.pretrained()
    if directory is None or holds_checkpoint(run):
        return []
    try:
        found = parse_config(type(options), read_config(directory))
    except UserError as error:
        return [Problem(f"model.weights={directory} holds {error.what}", *error.details[:2])]
    if found is None:
        return [Problem(f"model.weights={directory} holds a model without experts.", "", "moe=off")]
    hidden = options.hidden or max(1, (options.dense_hidden(run) or 0) // options.top_k)
    here = {name: getattr(options, name) for name in ("experts", "top_k", "shared", "shared_gate", "first", "every")}
    there = {name: getattr(found[0], name) for name in here} | {"hidden": found[0].hidden}
    here["hidden"] = hidden
    here |= _describe_router(options)
    there |= _describe_router(found[0])
    other = [f"moe.{n} is {there.get(n)} there and {v} here" for n, v in here.items() if v != there.get(n)]
    if not other:
        return []
    mend = f"gangline import {directory} prints the configuration that fits it."
    return [Problem(f"model.weights={directory} holds other experts.", "; ".join(other) + ".", mend)]


def _describe_router(options: MoeOptions) -> dict[str, Any]:
    """What the router computes, without what only training sees."""
    router = options.router
    names = [item.name for item in fields(router) if item.name in ("renormalise", "scale", "groups", "top_groups")]
    return {"router": type(router).__name__} | {f"router.{name}": getattr(router, name) for name in names}
