"""Model edit `mtp`: adds prediction modules after the last block, and their plan rules. Torch-free and pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gangline import UserError
from gangline.model.compose import compose_model
from gangline.model.linear_nodes import LinearNode
from gangline.model.tree import Node, get_parameter_shapes, iterate_nodes, map_paths, replace_node
from gangline.plan import HFName, Init, Plan, matches
from gangline_basics.model.decoder_nodes import DecoderNode, HeadNode
from gangline_models.hugging_face.names import find_hf_tensors
from gangline_models.mtp.nodes import MtpHeadNode, MtpNode

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.mtp.config import Mtp

# Submodule -> name in DeepSeek-V3's files, after the layer's prefix.
HF_MODULES = {"embed_norm": "enorm", "hidden_norm": "hnorm", "merge": "eh_proj", "head.norm": "shared_head.norm"}
COPIES = {"embed": "embed_tokens", "head": "shared_head.head"}  # copies of tensors that the model owns: not loaded
# Fields of `Plan` that list rules with a pattern; fields of `Plan` that list patterns.
RULES, PATTERNS = ("sharding", "inits", "seams", "low_bit"), ("master_dtype", "partial_grad", "frozen", "trained")


def edit(tree: Node, plan: Plan, options: Mtp) -> tuple[Node, Plan, list[str]]:
    """Wrap the head with MTP modules. Raises UserError if the head or the embedding is not supported."""
    nodes = dict(iterate_nodes(tree))
    head, last = nodes.get(plan.head), f"{plan.blocks}.{plan.layers - 1}"
    if not isinstance(tree, DecoderNode) or not isinstance(head, HeadNode):
        raise UserError("mtp=on does not support the head of this model.", "", "mtp=off, or another model.")
    embedding = sorted(get_parameter_shapes(map_paths(tree)[plan.embed]))
    if embedding != ["weight"]:
        why = f"The embedding has {', '.join(embedding)}; MTP modules need a single token embedding without positions."
        raise UserError("mtp=on does not support the embedding of this model.", why, "mtp=off, or another model.")
    modules = tuple(_make_module(tree, plan, head, index) for index in range(options.depth))
    node = MtpHeadNode(inner=map_paths(tree)[plan.head], mtp=modules, weight=options.weight)
    edited = replace_node(tree, plan.head, node)
    rules = _plan_modules(plan, head, options.depth) | {"names": tuple(_plan_names(plan, edited, options.depth))}
    ties = {
        f"{at}.{alias}": plan.get_owner(of)
        for at, n in iterate_nodes(edited)
        if at
        for alias, of in n.get_ties().items()
    }
    rules["tied"] = tuple(ties.items())
    rules["head_blocks"] = (f"{_get_modules_path(plan)}.*.block",)
    for kind, of_blocks in _plan_blocks(tree, plan, last).items():
        rules[kind] = (*rules.get(kind, ()), *of_blocks)
    return edited, plan.extend(**rules), [plan.head]


def _make_module(tree: Node, plan: Plan, head: HeadNode, index: int) -> MtpNode:
    nodes_of = map_paths(tree)
    embed, block = nodes_of[plan.embed], nodes_of[f"{plan.blocks}.{plan.layers - 1}"]
    shares = [(f"embed.{name}", f"{plan.embed}.{name}") for name in get_parameter_shapes(embed)]
    return MtpNode(
        path=f"{_get_modules_path(plan)}.{index}.block",
        first=index == 0,
        dim=head.dim,
        embed=embed,
        embed_norm=head.norm,
        hidden_norm=head.norm,
        merge=LinearNode(in_features=2 * head.dim, out_features=head.dim),
        block=block,
        head=replace(head, z=0.0),
        shares=(*shares, ("head.weight", f"{plan.head}.weight")),
    )


def _get_modules_path(plan: Plan) -> str:
    return f"{plan.head}.mtp"


def _plan_modules(plan: Plan, head: HeadNode, depth: int) -> dict[str, tuple[Any, ...]]:
    """Return the initialisation rules of the modules' norms and merges."""
    place, inits = f"{_get_modules_path(plan)}.*", list[Init]()
    for name in ("embed_norm", "hidden_norm", "head.norm"):
        for own in get_parameter_shapes(head.norm):
            inits.append(replace(plan.init(f"{plan.head}.norm.{own}"), pattern=f"{place}.{name}.{own}"))
    inits.append(replace(plan.init(plan.get_owner(f"{plan.head}.weight")), pattern=f"{place}.merge"))
    return {"inits": tuple(inits)}


def _plan_blocks(tree: Node, plan: Plan, last: str) -> dict[str, list[Any]]:
    """Return the plan's rules for the last block, with patterns for the modules' blocks."""
    inside = _Inside(tree, plan, last)
    rules: dict[str, list[Any]] = {}
    for kind in RULES:
        rules[kind] = [
            replace(rule, pattern=pattern) for rule in getattr(plan, kind) for pattern in inside.rename(rule.pattern)
        ]
    for kind in PATTERNS:
        rules[kind] = [renamed for pattern in getattr(plan, kind) for renamed in inside.rename(pattern)]
    return rules


class _Inside:
    """Translator from patterns of the last block to patterns of the modules' blocks."""

    def __init__(self, tree: Node, plan: Plan, last: str) -> None:
        self._plan, self._last = plan, last
        self._everywhere = [*get_parameter_shapes(tree), *map_paths(tree)]
        self._here = [name for name in self._everywhere if matches(last, name)]

    def rename(self, pattern: str) -> Iterator[str]:
        """Yield the renamed pattern if it matches a parameter, module or buffer of the last block."""
        number = self._last.rpartition(".")[2]
        for block in (f"{self._plan.blocks}.*", f"{self._plan.blocks}.{number}"):
            rest = pattern.removeprefix(block)
            if rest == pattern or (rest and not rest.startswith(".")):
                continue
            of_last = f"{self._last}{rest}"
            buffer = not any(matches(pattern, name) for name in self._everywhere)
            if any(matches(of_last, name) for name in self._here) or (
                buffer and of_last.rpartition(".")[0] in self._here
            ):
                yield f"{_get_modules_path(self._plan)}.*.block{rest}"


def _plan_names(plan: Plan, edited: Node, depth: int) -> Iterator[HFName]:
    """Yield the name rules of each module, as a layer after the last block, all optional.

    The names are empty if Hugging Face files of this model have no MTP modules.
    """
    blocks = f"{plan.blocks}.*."
    begin = _find_layer_prefix(plan)
    for index in range(depth):
        layer, path = plan.layers + index, f"{_get_modules_path(plan)}.{index}"
        for module, hf_module in (*HF_MODULES.items(), *COPIES.items()):
            for leaf in ("weight", "bias"):
                name = "" if begin is None else f"{begin.format(layer)}{hf_module}.{leaf}"
                yield HFName(f"{path}.{module}.{leaf}", name, optional=True)
        for rule in plan.names:
            if rule.pattern.startswith(blocks):
                hf_name = "" if begin is None else _number_layer(rule.hf_name, layer)
                yield replace(
                    rule, pattern=f"{path}.block.{rule.pattern[len(blocks) :]}", hf_name=hf_name, optional=True
                )


def _find_layer_prefix(plan: Plan) -> str | None:
    """Return a layer's name prefix, with a placeholder for its number; None if the files have no MTP modules."""
    merge = f"{plan.blocks}.*.{HF_MODULES['merge']}.weight"
    names = (rule.hf_name for rule in plan.names if rule.pattern == merge)
    return next((hf_name.removesuffix(f"{HF_MODULES['merge']}.weight") for hf_name in names), None)


def _number_layer(hf_name: str, layer: int) -> str:
    """Return the Hugging Face name with `layer` for {0}; the remaining placeholders are renumbered from 0."""
    hf_name = hf_name.replace("{0}", str(layer))
    for star in range(1, hf_name.count("{") + 1):
        hf_name = hf_name.replace(f"{{{star}}}", f"{{{star - 1}}}")
    return hf_name


def list_hf_names(run: Run) -> list[str]:
    """Return the Hugging Face names of the MTP modules' tensors."""
    tree, plan = compose_model(run)
    module_shapes = (
        (name, shape)
        for name, shape in get_parameter_shapes(tree).items()
        if name.startswith(f"{_get_modules_path(plan)}.")
    )
    return [hf_tensor.name for name, shape in module_shapes for hf_tensor in find_hf_tensors(plan, name, shape)]


def list_frozen(run: Run) -> list[str]:
    """Return the frozen parameters that the MTP modules own; [] if the model cannot be composed."""
    try:
        tree, plan = compose_model(run)
    except UserError:
        return []  # the check of the run composes the model too, and reports the error
    place = f"{_get_modules_path(plan)}."
    return [n for n in get_parameter_shapes(tree) if plan.get_owner(n).startswith(place) and plan.is_frozen(n)]
