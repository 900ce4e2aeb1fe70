"""The frozen weights of a model in fewer bits: what the plan says of them, and the node around a linear. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from gangline.model.linear_nodes import LinearNode
from gangline.model.local_sizes import LocalSizes
from gangline.model.products import Product
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
from gangline.plan import Cut, Init, LowBit, Name, Plan, is_matrix, matches

V = TypeVar("V")
CODES = "gangline_basics.model.low_bit:fill_codes"
LARGEST, SMALLEST = 64, 16  # of a block; a scale for fewer codes than that saves little


@dataclass(frozen=True, kw_only=True)
class EightBitNode(WrapNode):
    """A linear whose frozen weight is kept as codes: `weight` int8, beside it `scales` (out, in / block)."""

    module: ClassVar[str] = "gangline_basics.model.low_bit:EightBitLinear"
    in_features: int
    out_features: int
    block: int

    def get_shapes(self) -> dict[str, Shape]:
        return {"scales": (self.out_features, self.in_features // self.block)}

    def count_flops(self, sequence_length: int) -> int:
        """Not those of making numbers of codes, as of any other cast."""
        return 0

    def list_products(self, sizes: LocalSizes, sequence_length: int) -> tuple[Product, ...]:
        return ()

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        return 0

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"


def keep_in_bf16(tree: Node, plan: Plan) -> Plan:
    """Every frozen matrix, and stack of them, in bfloat16; not those that are computed in the master dtype."""
    shapes = get_parameter_shapes(tree)
    dtypes = {
        name: "bfloat16"
        for name, shape in shapes.items()
        if is_matrix(name, shape)
        and plan.is_frozen(name)
        and plan.find_low_bit(name) is None
        and not plan.computes_as_kept(name)
    }
    return plan.extend(low_bit=tuple(LowBit(place, "bfloat16") for place in _merge_rules(dtypes, shapes)))


def keep_in_8_bits(tree: Node, plan: Plan) -> tuple[Node, Plan, list[str]]:
    """(tree, plan, paths of the linears that are kept as codes); all other frozen matrices are kept in bfloat16.

    Those are plain linears whose inputs divide into blocks of `SMALLEST` codes at least, of a size that divides the
    unit of a cut along them.
    """
    plain = _find_plain(tree, plan)
    blocks = {path: size for path, linear in plain.items() if (size := _choose_block(path, linear, plan))}
    block_cuts: dict[str, tuple[int, Cut]] = {}  # the block of each, and the cut of its scales
    for path, size in blocks.items():
        height, width = plain[path].get_shapes()["weight"]
        around = EightBitNode(inner=map_paths(tree)[path], in_features=width, out_features=height, block=size)
        tree = replace_node(tree, path, around)
        cut = plan.get_cuts(f"{path}.weight", 2).get("tp")
        if cut is None:
            block_cuts[path] = size, Cut.whole("", "tp")
        else:
            block_cuts[path] = size, Cut("", cut.dim, "tp", max(1, cut.unit // size) if cut.dim else cut.unit)
    rules = _merge_rules(block_cuts, [path for path, _ in iterate_nodes(tree)])
    plan = plan.extend(
        low_bit=tuple(LowBit(f"{place}.weight", "int8", size, CODES) for place, (size, _) in rules.items()),
        cuts=tuple(replace(cut, pattern=f"{place}.scales") for place, (_, cut) in rules.items()),
        inits=tuple(Init(f"{place}.scales", "constant", 0.0) for place in rules),  # for who asks; codes say what it is
        names=tuple(Name(f"{place}.scales", "") for place in rules),
    )
    return tree, keep_in_bf16(tree, plan), list(blocks)


def _find_plain(tree: Node, plan: Plan) -> Mapping[str, LinearNode]:
    """Frozen linears that multiply by one matrix in the compute dtype, by path."""
    return {
        path: node
        for path, node in iterate_nodes(tree)
        if type(node) is LinearNode
        and plan.is_frozen(f"{path}.weight")
        and not any(matches(pattern, path) for pattern in plan.master_dtype)
    }


def _choose_block(path: str, linear: LinearNode, plan: Plan) -> int:
    """Codes of a block: the most, up to `LARGEST`, that divide the inputs and the unit of a cut along them; 0: none."""
    cut = plan.get_cuts(f"{path}.weight", 2).get("tp")
    unit = cut.unit if cut is not None and cut.dim == 1 and cut.unit > 1 else linear.in_features
    size = LARGEST
    while size >= SMALLEST:
        if linear.in_features % size == 0 and unit % size == 0:
            return size
        size //= 2
    return 0


def _merge_rules(said: Mapping[str, V], every: Iterable[str]) -> dict[str, V]:
    """What is said of paths as rules: one for all blocks where it is said alike of all of `every` that it matches.

    Else each path has its own, as blocks may be of unlike widths, and some of them trained.
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
