"""Translation of the plan's parameter names to Hugging Face tensors. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gangline.errors import UserError
from gangline.plan import HFName, Plan

Shapes = Mapping[str, tuple[int, ...]]

# Tensors that files may contain but that are computed from the configuration: they are skipped.
COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class HFTensor:
    """Hugging Face tensor that holds a parameter, or a part of the parameter.

    shape      shape of the tensor
    index      index of the tensor in a stacked parameter; None: the parameter is not stacked
    transpose  the tensor is the transposed parameter
    first      offset of the parameter along `dim` of a tensor that joins several parameters; None: not joined
    every      stride of the parameter along `dim`, from `first`
    optional   files may lack the tensor
    """

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    transpose: bool = False
    first: int | None = None
    every: int = 1
    dim: int = 0
    optional: bool = False


def find_hf_tensors(plan: Plan, name: str, shape: tuple[int, ...]) -> list[HFTensor]:
    """Return the Hugging Face tensors that make up a parameter. Raises UserError if the plan has no name for it."""
    for rule in plan.names:
        hf_name = rule.translate(name)
        if hf_name is None:
            continue
        if not hf_name:
            return []
        if rule.how == "stack":
            hf_names = (hf_name.replace("{n}", str(i)) for i in range(shape[0]))
            return [HFTensor(one, shape[1:], index=i, optional=rule.optional) for i, one in enumerate(hf_names)]
        first, dim = None, rule.dim
        if rule.rows is not None:
            first, shape = rule.rows[0], (*shape[:dim], rule.rows[1], *shape[dim + 1 :])
        turned = rule.how == "transpose" and len(shape) > 1
        if turned:
            last = len(shape) - 1
            shape = (*shape[:-2], shape[-1], shape[-2])
            dim = {last: last - 1, last - 1: last}.get(dim, dim)
        return [HFTensor(hf_name, shape, None, turned, first, rule.every, dim, rule.optional)]
    raise UserError(
        f"the model's plan has no Hugging Face name for parameter {name!r}.",
        "Add the name to `Plan.names` in the code of the model: loading and exporting weights require the name.",
    )


def find_unknown_names(plan: Plan, names: Iterable[str], shapes: Shapes | None = None) -> list[str]:
    """Return the Hugging Face `names` that match no parameter of the model.

    shapes: shapes of all parameters and persistent buffers. None: shapes unknown, so a block may have any name of the
    plan. Names marked `HFName.unread` are skipped.
    """
    names = list(names)
    here = None if shapes is None else _list_exact_names(plan, shapes)
    rules = [(rule, _compile_pattern(plan, rule)) for rule in plan.names if rule.hf_name]
    unread_layers = {
        layer for rule, pattern in rules if rule.unread == "layer" for layer in _match_layers(pattern, names)
    }

    def is_known(name: str) -> bool:
        if COMPUTED.fullmatch(name) or (here is not None and name in here):
            return True
        for rule, pattern in rules:
            if (match := pattern.fullmatch(name)) is None:
                continue
            layer = match.groupdict().get("layer")
            if layer is not None and int(layer) >= plan.layers:
                if int(layer) in unread_layers:
                    return True
            elif here is None or rule.unread:
                return True
        return False

    return [name for name in names if not is_known(name)]


def find_layers(plan: Plan, names: Iterable[str]) -> set[int]:
    """Return the layer numbers that appear in the Hugging Face `names`."""
    return {
        layer for rule in plan.names if rule.hf_name for layer in _match_layers(_compile_pattern(plan, rule), names)
    }


def _list_exact_names(plan: Plan, shapes: Shapes) -> set[str]:
    """Return the Hugging Face names of the parameters, and of aliases tied to a parameter."""
    aliases = (rule.translate(alias) for alias, _ in plan.tied for rule in plan.names)
    names = {hf_tensor.name for name, shape in shapes.items() for hf_tensor in find_hf_tensors(plan, name, shape)}
    return names | {name for name in aliases if name}


def _match_layers(pattern: re.Pattern[str], names: Iterable[str]) -> set[int]:
    if "layer" not in pattern.groupindex:
        return set()
    return {int(match["layer"]) for name in names if (match := pattern.fullmatch(name))}


def _compile_pattern(plan: Plan, rule: HFName) -> re.Pattern[str]:
    """Compile a rule to a pattern of Hugging Face names; group `layer` is the block number in a rule for all blocks."""
    hf_name = re.escape(rule.hf_name)
    if rule.pattern.startswith(f"{plan.blocks}.*."):
        hf_name = hf_name.replace(r"\{0\}", r"(?P<layer>\d+)", 1)
    return re.compile(re.sub(r"\\\{(\d+|n)\\\}", r"[^.]+", hf_name))
