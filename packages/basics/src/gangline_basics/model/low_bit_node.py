"""Frozen weights stored in bfloat16 or as 8-bit codes: rules of the plan, and the node around a linear. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from gangline.model.linear_nodes import LinearNode
from gangline.model.local_sizes import LocalSizes
from gangline.model.matmuls import AnyMatmul
from gangline.model.tree import (
    Decoding,
    Node,
    Shape,
    WrapNode,
    get_parameter_shapes,
    iterate_nodes,
    map_paths,
    replace_node,
)
from gangline.plan import HFName, Init, LowBit, Plan, ShardRule, is_matrix, matches

V = TypeVar("V")
CODES = "gangline_basics.model.low_bit:fill_codes"
LARGEST, SMALLEST = 64, 16  # maximum and minimum number of codes per block; smaller blocks save little memory


@dataclass(frozen=True, kw_only=True)
class EightBitNode(WrapNode):
    """Linear whose frozen weight is stored as codes: `weight` int8, and `scales` (out, in / block)."""

    module: ClassVar[str] = "gangline_basics.model.low_bit:EightBitLinear"
    in_features: int
    out_features: int
    block: int

    def get_shapes(self) -> dict[str, Shape]:
        return {"scales": (self.out_features, self.in_features // self.block)}

    def count_flops(self, sequence_length: int) -> int:
        """Return 0: dequantisation is not counted, like any other cast."""
        return 0

    def list_matmuls(self, sizes: LocalSizes, sequence_length: int) -> tuple[AnyMatmul, ...]:
        return ()

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        return 0

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"


def keep_in_bf16(tree: Node, plan: Plan) -> Plan:
    """Store frozen matrices, also stacked ones, in bfloat16, except matrices whose matmul is in the master dtype."""
    shapes = get_parameter_shapes(tree)
    dtypes = {
        name: "bfloat16"
        for name, shape in shapes.items()
        if is_matrix(name, shape)
        and plan.is_frozen(name)
        and plan.find_low_bit(name) is None
        and not plan.computes_as_stored(name)
    }
    return plan.extend(low_bit=tuple(LowBit(place, "bfloat16") for place in _merge_rules(dtypes, shapes)))


def keep_in_8_bits(tree: Node, plan: Plan) -> tuple[Node, Plan, list[str]]:
    """Return (tree, plan, paths of the linears stored as codes); all other frozen matrices are stored in bfloat16.

    A plain linear is stored as codes if a block size from `SMALLEST` to `LARGEST` divides its input features, and also
    the granularity of the sharding if the weight is sharded along its input features.
    """
    plain = _find_plain(tree, plan)
    blocks = {path: size for path, linear in plain.items() if (size := _choose_block(path, linear, plan))}
    scale_rules: dict[str, tuple[int, ShardRule]] = {}  # path -> its block size, and the sharding of its scales
    for path, size in blocks.items():
        height, width = plain[path].get_shapes()["weight"]
        around = EightBitNode(inner=map_paths(tree)[path], in_features=width, out_features=height, block=size)
        tree = replace_node(tree, path, around)
        rule = plan.get_shard_rules(f"{path}.weight", 2).get("tp")
        if rule is None:
            scale_rules[path] = size, ShardRule.replicated("", "tp")
        else:
            scale_rules[path] = (
                size,
                ShardRule("", rule.dim, "tp", max(1, rule.granularity // size) if rule.dim else rule.granularity),
            )
    patterns = _merge_rules(scale_rules, [path for path, _ in iterate_nodes(tree)])
    plan = plan.extend(
        low_bit=tuple(LowBit(f"{place}.weight", "int8", size, CODES) for place, (size, _) in patterns.items()),
        sharding=tuple(replace(rule, pattern=f"{place}.scales") for place, (_, rule) in patterns.items()),
        # a placeholder: the function CODES fills the scales
        inits=tuple(Init(f"{place}.scales", "constant", 0.0) for place in patterns),
        names=tuple(HFName(f"{place}.scales", "") for place in patterns),
    )
    return tree, keep_in_bf16(tree, plan), list(blocks)


def _find_plain(tree: Node, plan: Plan) -> Mapping[str, LinearNode]:
    """Return path -> frozen linear, for plain linears whose matmul is in the compute dtype."""
    return {
        path: node
        for path, node in iterate_nodes(tree)
        if type(node) is LinearNode
        and plan.is_frozen(f"{path}.weight")
        and not any(matches(pattern, path) for pattern in plan.master_dtype)
    }


def _choose_block(path: str, linear: LinearNode, plan: Plan) -> int:
    """Return the largest block size, up to `LARGEST`, that divides the inputs and the sharding granularity; or 0."""
    rule = plan.get_shard_rules(f"{path}.weight", 2).get("tp")
    granularity = (
        rule.granularity if rule is not None and rule.dim == 1 and rule.granularity > 1 else linear.in_features
    )
    size = LARGEST
    while size >= SMALLEST:
        if linear.in_features % size == 0 and granularity % size == 0:
            return size
        size //= 2
    return 0


def _merge_rules(said: Mapping[str, V], every: Iterable[str]) -> dict[str, V]:
    """Return {pattern: value} for `said`, which maps paths to values.

    Paths that differ only in block numbers share one pattern if all such paths of `every` have the same value.
    Otherwise each path is its own pattern, because blocks may differ in width, and some may be trained.
    """
    alike: dict[str, list[V | None]] = {}
    for path in every:
        alike.setdefault(_replace_numbers(path), []).append(said.get(path))
    return {
        _replace_numbers(path) if all(other == value for other in alike[_replace_numbers(path)]) else path: value
        for path, value in said.items()
    }


def _replace_numbers(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
