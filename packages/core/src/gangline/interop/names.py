"""From the plan's names to theirs, array by array. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gangline.errors import UserError
from gangline.plan import Name, Plan

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


def theirs_of(plan: Plan, name: str, shape: tuple[int, ...]) -> list[Theirs]:
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


def strangers(plan: Plan, names: Iterable[str]) -> list[str]:
    """Those of their `names` that no rule of the plan accounts for: a model that computes something else."""
    known = [_pattern(rule) for rule in plan.names if rule.theirs]
    return [
        name for name in names if not COMPUTED.fullmatch(name) and not any(pattern.fullmatch(name) for pattern in known)
    ]


def _pattern(rule: Name) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\d+|n)\\\}", r"[^.]+", re.escape(rule.theirs)))
