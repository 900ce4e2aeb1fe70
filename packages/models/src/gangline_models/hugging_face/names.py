"""From the plan's names to theirs, array by array. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gangline.errors import UserError
from gangline.plan import Name, Plan

Shapes = Mapping[str, tuple[int, ...]]

# What files hold beside the weights: nothing is lost by passing over it.
COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Theirs:
    """One of their tensors: the whole of ours, or, where theirs are stacked in ours, number `index` of it.

    shape: of theirs. Where several of ours make it up, ours begins `first` along dim `dim` of it and has every
    `every`th of it from there. optional: files may lack it.
    """

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    transpose: bool = False
    first: int | None = None
    every: int = 1
    dim: int = 0
    optional: bool = False


def find_theirs(plan: Plan, name: str, shape: tuple[int, ...]) -> list[Theirs]:
    """Their tensors that make up our parameter `name`. Raises UserError where the plan gives it no name."""
    for rule in plan.names:
        theirs = rule.translate(name)
        if theirs is None:
            continue
        if not theirs:
            return []
        if rule.how == "stack":
            each = (theirs.replace("{n}", str(i)) for i in range(shape[0]))
            return [Theirs(one, shape[1:], index=i, optional=rule.optional) for i, one in enumerate(each)]
        first, dim = None, rule.dim
        if rule.rows is not None:
            first, shape = rule.rows[0], (*shape[:dim], rule.rows[1], *shape[dim + 1 :])
        turned = rule.how == "transpose" and len(shape) > 1
        if turned:
            last = len(shape) - 1
            shape = (*shape[:-2], shape[-1], shape[-2])
            dim = {last: last - 1, last - 1: last}.get(dim, dim)
        return [Theirs(theirs, shape, None, turned, first, rule.every, dim, rule.optional)]
    raise UserError(
        f"the model's plan has no Hugging Face name for parameter {name!r}.",
        "Its author says in `Plan.names` what others call each parameter; without that it cannot be read or written.",
    )


def find_unknown_names(plan: Plan, names: Iterable[str], shapes: Shapes | None = None) -> list[str]:
    """Return those of the external `names` that match no parameter of the model.

    shapes: of all parameters and persistent buffers; None: unknown, and a block may hold all that the plan has names
    for. A name of what `Name.unread` says is none of them.
    """
    names = list(names)
    here = None if shapes is None else _list_exact_names(plan, shapes)
    rules = [(rule, _compile_pattern(plan, rule)) for rule in plan.names if rule.theirs]
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
    """The numbers of the layers that their `names` are of."""
    return {layer for rule in plan.names if rule.theirs for layer in _match_layers(_compile_pattern(plan, rule), names)}


def _list_exact_names(plan: Plan, shapes: Shapes) -> set[str]:
    """Their names of the parameters, and of those that are tied to one."""
    aliases = (rule.translate(alias) for alias, _ in plan.tied for rule in plan.names)
    names = {theirs.name for name, shape in shapes.items() for theirs in find_theirs(plan, name, shape)}
    return names | {name for name in aliases if name}


def _match_layers(pattern: re.Pattern[str], names: Iterable[str]) -> set[int]:
    if "layer" not in pattern.groupindex:
        return set()
    return {int(match["layer"]) for name in names if (match := pattern.fullmatch(name))}


def _compile_pattern(plan: Plan, rule: Name) -> re.Pattern[str]:
    """Their names by a rule; of one about every block, group `layer` is the number of the block."""
    theirs = re.escape(rule.theirs)
    if rule.pattern.startswith(f"{plan.blocks}.*."):
        theirs = theirs.replace(r"\{0\}", r"(?P<layer>\d+)", 1)
    return re.compile(re.sub(r"\\\{(\d+|n)\\\}", r"[^.]+", theirs))
