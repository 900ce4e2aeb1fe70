"""Model data that all layouts of a model share, computed once for all equal blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

from gangline.model.flops import count_flops_per_token, count_parameters
from gangline.model.tree import Node, get_parameter_shapes, iterate_nodes, map_paths
from gangline.plan import Plan

REMEMBERED = 32  # maximum number of cached models; a search over fold sizes has one model for each size


class Memo:
    """Cache of results by key, with at most `most` results: it drops the oldest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the cached result of a key, or compute the result with `make` and cache it."""
        if key not in self._known:
            result = make()
            if len(self._known) >= self.most:
                del self._known[next(iter(self._known))]
            self._known[key] = result
        return self._known[key]


class AlikeBlocks:
    """A model's nodes and shapes, and the kind of each block; equal blocks have the same kind.

    arrays, microbatches, partitions: caches of results for layouts of this model; a key holds the options that the
    result depends on
    """

    def __init__(self, tree: Node, plan: Plan) -> None:
        self.tree, self.plan = tree, plan
        self.arrays, self.microbatches, self.partitions = Memo(64), Memo(1024), Memo(1024)
        self._flops: dict[int, tuple[list[int], int, int]] = {}
        self._token_flops: dict[int, int] = {}

    @cached_property
    def by_path(self) -> dict[str, Node]:
        return map_paths(self.tree)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return get_parameter_shapes(self.tree)

    @cached_property
    def parameters(self) -> int:
        return count_parameters(self.tree)

    @cached_property
    def blocks(self) -> list[Node]:
        """Return the nodes of the blocks, in order; equal nodes are one object."""
        same: dict[Node, Node] = {}
        nodes = [self.by_path[f"{self.plan.blocks}.{index}"] for index in range(self.plan.layers)]
        return [same.setdefault(node, node) for node in nodes]

    @cached_property
    def kinds(self) -> list[int]:
        """Return the kind of each block: the index of the first block with an equal node and equal plan rules."""
        if names_single_blocks(self.plan):
            return list(range(self.plan.layers))
        first: dict[int, int] = {}
        return [first.setdefault(id(node), index) for index, node in enumerate(self.blocks)]

    def get_forward_flops(self, sequence_length: int) -> tuple[list[int], int, int]:
        """Return the forward FLOPs of one token: through each block, through the embedding, and through the head."""
        if sequence_length not in self._flops:
            count = {kind: count_forward_flops(self.blocks[kind], sequence_length) for kind in set(self.kinds)}
            first, last = (
                count_forward_flops(self.by_path[part], sequence_length) for part in (self.plan.embed, self.plan.head)
            )
            self._flops[sequence_length] = ([count[kind] for kind in self.kinds], first, last)
        return self._flops[sequence_length]

    def count_token_flops(self, sequence_length: int) -> int:
        """Return `count_flops_per_token` of the model, cached."""
        if sequence_length not in self._token_flops:
            self._token_flops[sequence_length] = count_flops_per_token(self.tree, sequence_length, self.plan)
        return self._token_flops[sequence_length]


def count_forward_flops(node: Node, sequence_length: int) -> int:
    """Return the forward FLOPs of one token through a node and its children, counted as in `gangline.model.flops`."""
    return sum(inner.count_flops(sequence_length) for _, inner in iterate_nodes(node))


def names_single_blocks(plan: Plan) -> bool:
    """Return whether any rule of a plan applies to a single block instead of all blocks."""
    rules = [
        *(rule.pattern for rule in plan.sharding),
        *plan.master_dtype,
        *plan.partial_grad,
        *plan.frozen,
        *plan.trained,
    ]
    rules += [name for names in plan.tied for name in names] + [rule.pattern for rule in plan.low_bit]
    inside = (rule.removeprefix(f"{plan.blocks}.") for rule in rules if rule.startswith(f"{plan.blocks}."))
    return any(rule.split(".")[0] != "*" for rule in inside)


_KNOWN: dict[tuple[int, int], AlikeBlocks] = {}


def group_blocks(tree: Node, plan: Plan) -> AlikeBlocks:
    """Return the `AlikeBlocks` of a model, cached by identity of tree and plan, which the cache keeps alive."""
    key = (id(tree), id(plan))
    alike_blocks = _KNOWN.pop(key, None) or AlikeBlocks(tree, plan)
    if len(_KNOWN) >= REMEMBERED:
        del _KNOWN[next(iter(_KNOWN))]
    _KNOWN[key] = alike_blocks
    return alike_blocks
