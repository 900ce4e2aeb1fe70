"""Hugging Face format of the edit `moe`: read and write the experts in config.json, and check `model.weights`.

Torch-free.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gangline import Problem, UserError
from gangline_models.hugging_face.contract import EditFormat
from gangline_moe.interop.architectures import ARCHITECTURES, QWEN, ExpertsArchitecture
from gangline_moe.interop.read import Options, read_experts
from gangline_moe.routers.config import Grouped, Sigmoid

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_moe.config import MoeOptions


class MoeFormat(EditFormat):
    """Converter between the options of experts and a config.json of one of `ARCHITECTURES`."""

    def read(self, cls: type[Options], config: dict[str, Any]) -> tuple[Options, dict[str, Any]] | None:
        return read_experts(cls, config)

    def write(self, options: MoeOptions, config: dict[str, Any]) -> dict[str, Any] | None:
        dense = config["architectures"][0]
        candidates = [of for of in ARCHITECTURES if of.dense == dense]
        if not candidates:
            return None
        of = next((of for of in candidates if of.scored == isinstance(options.router, Sigmoid)), candidates[0])
        if words := list_missing_overrides(of, options, config):
            what = f"cannot write a config.json: Hugging Face has no {dense} with the experts of this run."
            raise UserError(
                what, f"Hugging Face has this architecture with experts only for runs with  {' '.join(words)}"
            )
        return _write_fields(of, options, config)


def list_missing_overrides(of: ExpertsArchitecture, options: MoeOptions, config: dict[str, Any]) -> list[str]:
    """Return the overrides that the run lacks to match this architecture.

    config: the config.json of the model without experts.
    """
    router, (kind, name), has_shared = options.router, of.router, of.scored or of.gated
    fits = isinstance(router, Sigmoid) if of.scored else type(router) is kind
    holds = {
        f"moe/router={name}": fits,
        "moe.router.renormalise=true": not fits or not of.everywhere or getattr(router, "renormalise", False),
        f"moe.router.bias_rate={0.001 if of.scored else 0}": not fits or bool(router.bias_rate) == of.scored,
        "moe.first=0": not of.everywhere or options.first == 0,
        "moe.every=1": not (of.everywhere or of.scored) or options.every == 1,
        f"moe.shared={int(has_shared)}": bool(options.shared) == has_shared,
        f"moe.shared_gate={str(of.gated).lower()}": options.shared_gate == of.gated,
        "moe.capacity_factor=null": options.capacity_factor is None,
        "model.window=null": of.dense != QWEN or not config.get("use_sliding_window"),
    }
    return [word for word, condition in holds.items() if not condition]


def _write_fields(of: ExpertsArchitecture, options: MoeOptions, config: dict[str, Any]) -> dict[str, Any]:
    router, hidden = options.router, options.ffn_dim or max(1, config["intermediate_size"] // options.top_k)
    layers = range(config["num_hidden_layers"])
    dense_blocks = [block for block in layers if block < options.first or (block - options.first) % options.every]
    groups = (router.groups, router.top_groups) if isinstance(router, Grouped) else (1, 1)
    every = {
        "norm_topk_prob": getattr(router, "renormalise", None),
        "routed_scaling_factor": getattr(router, "scale", None),
        "n_group": groups[0],
        "topk_group": groups[1],
        "n_shared_experts": options.shared,
        "first_k_dense_replace": options.first,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": options.shared * hidden,
    }
    architecture_fields = {"architectures": [of.name], "model_type": of.model_type, "sliding_window": None}
    return {
        **{name: value for name, value in config.items() if of.dense != QWEN or name != "layer_types"},
        **(architecture_fields if of.model_type else {}),
        **{name: value for name, value in every.items() if name in of.silent},
        **({"mlp_only_layers": dense_blocks} if "decoder_sparse_step" in of.silent else {}),
        "num_experts_per_tok": options.top_k,
        "router_aux_loss_coef": router.global_aux_loss,
        of.number: options.experts,
        of.width: hidden,
    }


def find_weight_problems(options: MoeOptions, run: Run) -> list[Problem]:
    """Return a problem if the options differ from the experts of the model in `model.weights`."""
    from gangline.run.directory import holds_checkpoint
    from gangline_models.hugging_face.config import read_config

    directory = run.model.get_weights_directory()
    if directory is None or holds_checkpoint(run):
        return []
    try:
        stored_experts = read_experts(type(options), read_config(directory))
    except UserError as error:
        return [Problem(f"model.weights={directory}: {error.what}", *error.details[:2])]
    if stored_experts is None:
        return [Problem(f"model.weights={directory} is a dense model (no experts).", "", "moe=off")]
    hidden = options.ffn_dim or max(1, (options.get_dense_hidden(run) or 0) // options.top_k)
    here, there = _describe(options) | {"ffn_dim": hidden}, _describe(stored_experts[0])
    other = [
        f"moe.{n} is {there.get(n)} in the directory and {v} in this run" for n, v in here.items() if v != there.get(n)
    ]
    if not other:
        return []
    fix = f"gangline import {directory} prints the matching configuration."
    return [
        Problem(
            f"the experts in model.weights={directory} differ from the experts of this run.",
            "; ".join(other) + ".",
            fix,
        )
    ]


def _describe(options: MoeOptions) -> dict[str, Any]:
    """Return the options that determine the output of experts and router, without training-only options."""
    router, own = options.router, ("experts", "top_k", "shared", "shared_gate", "first", "every", "ffn_dim")
    names = [item.name for item in fields(router) if item.name in ("renormalise", "scale", "groups", "top_groups")]
    of_router = {f"router.{name}": getattr(router, name) for name in names}
    return {**{name: getattr(options, name) for name in own}, "router": type(router).__name__, **of_router}
