"""Model edit `lora`: wraps linears with adapters, and adds the adapters' rules to the plan. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from gangline import UserError
from gangline.model.linear_nodes import LinearNode
from gangline.model.tree import Node, iterate_nodes, map_paths, replace_node
from gangline.plan import HFName, Init, Plan, ShardRule, names
from gangline_basics.model.low_bit_node import keep_in_8_bits, keep_in_bf16
from gangline_finetune.lora.config import LoraConfig
from gangline_finetune.lora.nodes import DoraNode, DroppedLoraNode, LengthsNode, LoraNode


def edit(tree: Node, plan: Plan, options: LoraConfig) -> tuple[Node, Plan, list[str]]:
    """Wrap the target linears. Raises UserError for an unmatched target, or options unsupported by stacked matrices."""
    plan, coded = plan.extend(frozen=("*",)), list[str]()
    if options.base == "bf16":
        plan = keep_in_bf16(tree, plan)
    elif options.base == "8bit":
        tree, plan, coded = keep_in_8_bits(tree, plan)
    linears = {path: node for path, node in iterate_nodes(tree) if isinstance(node, LinearNode)}
    chosen_linears = choose_linears(linears, options.targets)
    _check_stacks(chosen_linears, options)
    shard_rules: dict[str, tuple] = {}
    inits: dict[str, tuple] = {}
    hf_names: dict[str, tuple] = {}
    trained_parts: dict[str, tuple] = {}
    for path, linear in chosen_linears.items():
        tree = replace_node(tree, path, _wrap(map_paths(tree)[path], linear, options, _get_site(path, plan)))
        place = ".".join("*" if part.isdigit() else part for part in path.split("."))  # one rule for all blocks
        a, b, lengths = (f"{place}.{name}" for name in ("lora_a", "lora_b", "lora_lengths"))
        parts = (a, b, lengths) if options.dora else (a, b)
        rule = plan.get_shard_rules(f"{path}.weight", len(linear.get_shapes()["weight"])).get("tp")
        shard_rules[place] = _make_rules(rule, a, b) + (_make_length_rules(rule, lengths) if options.dora else ())
        inits[place] = (
            Init(a, "uniform", linear.in_features**-0.5),
            *(Init(part, "constant", 0.0) for part in parts[1:]),
        )
        hf_names[place] = tuple(
            HFName(f"{part}.weight", "") for part in parts
        )  # base directories have no adapter tensors
        trained_parts[place] = parts
    every = {"sharding": shard_rules, "inits": inits, "names": hf_names, "trained": trained_parts}
    rules: dict[str, tuple] = {kind: sum(of_places.values(), ()) for kind, of_places in every.items()}
    return tree, plan.extend(**rules), list(dict.fromkeys([*chosen_linears, *coded]))


def choose_linears(linears: Mapping[str, LinearNode], targets: Iterable[str]) -> dict[str, LinearNode]:
    """Return path -> linear of the linears that match a target. Raises UserError for a target without a match.

    A target without a dot matches the last name of a path, and * matches any characters. A target with dots matches a
    complete path, and * matches one name.
    """
    paths: set[str] = set()
    for target in targets:
        own = {path for path in linears if _matches_target(target, path)}
        if not own:
            last = sorted({path.rpartition(".")[2] for path in linears})
            raise UserError(
                f"lora.targets: {target} matches no linear of this model.",
                f"Linears of the model: {', '.join(last)}. Also valid: * or a path such as {next(iter(linears), '-')}.",
            )
        paths |= own
    if not paths:
        raise UserError("lora.targets=[] selects no linear to train.", "lora.targets=['*'] wraps every linear.")
    return {path: node for path, node in linears.items() if path in paths}


def _matches_target(target: str, path: str) -> bool:
    return names(target, path) if "." in target else fnmatchcase(path.rpartition(".")[2], target)


def _check_stacks(found: Mapping[str, LinearNode], options: LoraConfig) -> None:
    stack = next((path for path, linear in found.items() if len(linear.get_shapes()["weight"]) > 2), None)
    settings = [f"lora.{name}" for name in ("dropout", "dora") if getattr(options, name)]
    if stack and settings:
        raise UserError(
            f"{' and '.join(settings)} cannot be used with {stack}, which holds several stacked matrices.",
            "Its input rows are sorted by matrix, so dropout cannot find positions; DoRA needs a single matrix.",
            f"Exclude {stack} from lora.targets, or disable {settings[0]}.",
        )


def _get_site(path: str, plan: Plan) -> str:
    """Return a linear's path within its block, equal for all blocks; random draws depend on the block too."""
    return re.sub(rf"{re.escape(plan.blocks)}\.\d+\.", "", path, count=1)


def _wrap(inner: Node, linear: LinearNode, options: LoraConfig, site: str) -> LoraNode:
    lora_a = replace(linear, out_features=options.rank, bias=False)
    lora_b = replace(linear, in_features=options.rank, bias=False)
    if options.dora:
        lengths = LengthsNode(out_features=linear.out_features)
        return DoraNode(
            inner=inner,
            lora_a=lora_a,
            lora_b=lora_b,
            scale=options.scale,
            dropout=options.dropout,
            site=site,
            lora_lengths=lengths,
        )
    if options.dropout:
        return DroppedLoraNode(
            inner=inner, lora_a=lora_a, lora_b=lora_b, scale=options.scale, dropout=options.dropout, site=site
        )
    return LoraNode(inner=inner, lora_a=lora_a, lora_b=lora_b, scale=options.scale)


def _make_rules(rule: ShardRule | None, a: str, b: str) -> tuple[ShardRule, ...]:
    if rule is None:
        return ()
    if rule.dim == 0:  # column parallel: A replicated, B sharded by rows
        return (ShardRule.replicated(a, "tp"), ShardRule.colwise(b, rule.granularity))
    return (
        ShardRule.rowwise(a, rule.granularity),
        ShardRule.replicated(b, "tp"),
    )  # row parallel: A sharded by input features, its outputs summed


def _make_length_rules(rule: ShardRule | None, lengths: str) -> tuple[ShardRule, ...]:
    return (
        (ShardRule.colwise(lengths, rule.granularity),)
        if rule is not None and rule.dim == 0
        else (ShardRule.replicated(lengths, "tp"),)
    )
