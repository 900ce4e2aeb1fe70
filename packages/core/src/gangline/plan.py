"""Plan of a model: how it may be sharded, as torch-free data next to the model's configuration.

A strategy reads only the plan of a model, and the model is independent of ranks. `ShardRule.colwise` and `rowwise` have
the meaning of colwise and rowwise in transformers' `base_model_tp_plan`.

Patterns are dotted module or parameter names in which `*` stands for one component:
``blocks.*.attention.wq`` matches ``blocks.0.attention.wq`` and, as a module pattern, every parameter in it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from gangline.mesh import Mesh


V = TypeVar("V")
EVERY_AXIS = "*"
NO_DIM = sys.maxsize  # a dim number that no array has
SCALES = ".scales"  # suffix of the names of quantization scales, which are stored next to codes


@lru_cache(maxsize=4096)
def _compile_regex(pattern: str) -> re.Pattern[str]:
    return re.compile("(" + re.escape(pattern).replace(r"\*", r"[^.]+") + r")(\..+)?")


def matches(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches `name`, or a module that contains `name`."""
    return _compile_regex(pattern).fullmatch(name) is not None


def names(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches `name` itself, and not only a module that contains `name`."""
    match = _compile_regex(pattern).fullmatch(name)
    return match is not None and match[2] is None


def parse_block_number(path: str) -> int:
    """Return the number of the block at `path`: the last number in `path`. Raises StopIteration without a number."""
    return next(int(part) for part in reversed(path.split(".")) if part.isdecimal())


def _rank_specificity(pattern: str) -> tuple[int, int]:
    return pattern.count("."), -pattern.count("*")


def choose_by_pattern(values: Mapping[str, V], name: str, default: V) -> V:
    """Return the value of the most specific pattern that matches `name`, on a tie the first; `default` without a match.

    The most specific pattern has the most components and, among equals, the fewest stars.
    """
    patterns = [pattern for pattern in values if matches(pattern, name)]
    return values[max(patterns, key=_rank_specificity)] if patterns else default


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter is one matrix or several stacked matrices. Stacked biases are vectors."""
    return len(shape) >= 2 and not name.endswith(".bias")


def is_mapped(name: str, shape: Sequence[int]) -> bool:
    """Return whether `Runtime.map_matrices` takes a parameter: both dims of its matrices are longer than 1.

    Filters of a depthwise convolution, (channels, 1, taps), count as vectors.
    """
    return is_matrix(name, shape) and min(shape[-2:]) > 1


@dataclass(frozen=True)
class ShardRule:
    """Parameters matching `pattern` may be sharded along tensor dim `dim` by mesh (or fold) axis `axis`.

    `granularity`: number of consecutive indices along `dim` that stay on one rank: shards end at multiples of it (the
    width of a head). `Plan.get_shard_rules` chooses the rule. A pattern of a module covers all its parameters, also
    parameters that an edit adds. Raises ValueError for a negative dim, a granularity below 1, and one dim sharded by
    every axis.
    """

    pattern: str
    dim: int
    axis: str = "tp"
    granularity: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0 or self.granularity < 1:
            raise ValueError(
                f"shard rule of {self.pattern}: dim={self.dim} must be >= 0, granularity={self.granularity} >= 1"
            )
        if self.axis == EVERY_AXIS and self.dim != NO_DIM:
            raise ValueError(
                f"shard rule of {self.pattern}: every axis cannot shard one dim; ShardRule.replicated shards no dim"
            )

    @classmethod
    def colwise(cls, pattern: str, granularity: int = 1) -> ShardRule:
        """Return the rule of Y = X Wᵀ with W (out, in) sharded along the output dim."""
        return cls(pattern, 0, "tp", granularity)

    @classmethod
    def rowwise(cls, pattern: str, granularity: int = 1) -> ShardRule:
        """Return the rule of Y = X Wᵀ with W (out, in) sharded along the input dim: Y is a sum of partial results."""
        return cls(pattern, 1, "tp", granularity)

    @classmethod
    def replicated(cls, pattern: str, axis: str = EVERY_AXIS) -> ShardRule:
        """Return a rule that leaves parameters unsharded along `axis` (by default every axis) despite later rules."""
        return cls(pattern, NO_DIM, axis)


@dataclass(frozen=True)
class Fold:
    """A named axis of `size` ranks: neighbours on the fastest of the mesh axes `out_of`, whose order has no effect."""

    name: str
    size: int
    out_of: tuple[str, ...]

    def list_ranks(self, mesh: Mesh, rank: int) -> list[int]:
        """Return the ranks of the fold of `rank`, in order; only `rank` itself if the mesh has none of the fold's axes.

        The ranks along the fold's axes, in mesh order, are split into groups of `size` consecutive ranks: neighbours on
        the fastest axes form a fold. Raises ValueError if `size` does not divide the number of these ranks.
        """
        joint, together = self._place(mesh, rank)
        first = joint - joint % self.size
        return self._list_ranks_at(mesh, rank, range(first, min(first + self.size, together)))

    def list_rest_ranks(self, mesh: Mesh, rank: int) -> list[int]:
        """Return the ranks with the index of `rank` in their own folds, in order. Raises ValueError as `list_ranks`."""
        joint, together = self._place(mesh, rank)
        return self._list_ranks_at(mesh, rank, range(joint % self.size, together, self.size))

    def _place(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """Return (joint index of `rank` along the fold's axes, number of ranks along them)."""
        axes = self._list_axes(mesh)
        together = mesh.size(*axes)
        if together > 1 and together % self.size:
            raise ValueError(
                f"{self.name}={self.size} must divide the {together} ranks along its axes {' x '.join(axes)}"
            )
        return mesh.index(mesh.coordinate(rank), axes), together

    def _list_ranks_at(self, mesh: Mesh, rank: int, joints: Iterable[int]) -> list[int]:
        axes, coordinate = self._list_axes(mesh), mesh.coordinate(rank)
        return [mesh.rank({**coordinate, **mesh.coordinate_along(axes, joint)}) for joint in joints]

    def _list_axes(self, mesh: Mesh) -> tuple[str, ...]:
        return tuple(axis for axis in mesh.axes if axis in self.out_of)


@dataclass(frozen=True)
class Init:
    """Rule for the initial values of parameters matching `pattern`; the first matching rule is used.

    distribution: "normal" (standard deviation `scale`), "uniform" (in ±`scale`), "constant" (all values `scale`).
    """

    pattern: str
    distribution: Literal["normal", "uniform", "constant"]
    scale: float = 1.0


@dataclass(frozen=True)
class HFName:
    """The external name (`hf_name`) of a parameter, where `{0}`, `{1}` stand for the matches of the stars of `pattern`.

    how: "same"; "transpose" if the external matrix (or each stacked matrix) is transposed; "stack" if the parameter
    (N, ...) is stored as N external tensors, numbered by `{n}`. An empty `hf_name`: a buffer without external tensor.
    rows: (first, of): several parameters share one external tensor of `of` rows (queries, keys, values); this parameter
    begins at row `first`; columns if transposed. None: not shared.
    every: the parameter is the rows first, first + every, ...; the rows between belong to every - 1 other parameters.
    dim: the dim of the parameter along which `rows` counts.
    optional: files may lack the external tensor; the parameter then gets initial values.
    unread: files may hold this tensor although the model has no such parameter; it is ignored: alone ("tensor", such as
    a mask), or with its full layer after the model's last block ("layer").
    """

    pattern: str
    hf_name: str
    how: Literal["same", "transpose", "stack"] = "same"
    rows: tuple[int, int] | None = None
    every: int = 1
    dim: int = 0
    optional: bool = False
    unread: Literal["", "tensor", "layer"] = ""

    def translate(self, name: str) -> str | None:
        """Return the external name of the parameter `name`; None if the pattern does not match `name`."""
        match = re.fullmatch(re.escape(self.pattern).replace(r"\*", r"([^.]+)"), name)
        return None if match is None else self.hf_name.format(*match.groups(), n="{n}")


@dataclass(frozen=True)
class LowBit:
    """Rule: frozen parameters matching `pattern` are stored in fewer bits, under any precision.

    bfloat16  dtype that replaces the precision's `param_dtype`
    int8      a matrix W (out, in) of a linear is stored as codes, next to `scales` (out, in / block), float32, one per
              `block` neighbouring elements of a row. The module computes with the stored codes and scales
    codes     "package.module:function", called as function(shard, plan, fill): fills a shard of codes or scales;
              `fill` fills a shard with the weight before quantization

    Raises ValueError for int8 without `block` or `codes`, and for bfloat16 with either.
    """

    pattern: str
    dtype: Literal["bfloat16", "int8"]
    block: int = 0
    codes: str = ""

    def __post_init__(self) -> None:
        if {self.dtype == "int8", self.block > 0, bool(self.codes)} == {True, False}:
            raise ValueError(
                f"{self.pattern}: {self.dtype} with block={self.block} and codes={self.codes!r}; int8 needs both, "
                "bfloat16 neither"
            )


@dataclass(frozen=True)
class Seam:
    """A call that a strategy may replace: the modules matching `pattern` call their attribute `name`.

    Signatures of the calls:
      attention(q, k, v, document, position) -> out     q (B, H, T, C), k and v (B, K, T, C), after rotation
      loss(hidden, weight, targets, loss_mask) -> sum   hidden (B, T, D), weight (V, D), targets and loss_mask (B, T)

    The module's node declares what the call computes (`Node.get_seams`); a function or module that replaces the call
    declares it in its attribute `computes`. A strategy that replaces the call must compute exactly this, or refuse.
    """

    name: Literal["attention", "loss"]
    pattern: str


@dataclass(frozen=True)
class Plan:
    """Rules of one model: its stages, and how its parameters are sharded, initialized, named and trained."""

    embed: str  # path of the module (batch) -> hidden
    blocks: str  # path of the ModuleList of (hidden, batch) -> hidden
    head: str  # path of the module (hidden, batch) -> loss sum
    layers: int  # number of blocks
    sharding: tuple[ShardRule, ...] = ()
    inits: tuple[Init, ...] = ()
    names: tuple[HFName, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()  # (alias, name of the stored parameter)
    seams: tuple[Seam, ...] = ()
    folds: tuple[Fold, ...] = ()
    master_dtype: tuple[str, ...] = ()  # modules that always compute in the master dtype (a router)
    partial_grad: tuple[str, ...] = ()  # parameters replicated over tp with sharded inputs: sum gradients over tp
    frozen: tuple[str, ...] = ()  # parameters that are not trained: saved, without gradient or optimizer state
    low_bit: tuple[LowBit, ...] = ()  # frozen parameters that are stored in fewer bits
    trained: tuple[str, ...] = ()  # exceptions from `frozen`; the most specific pattern wins
    head_blocks: tuple[str, ...] = ()  # blocks inside the head: they emit under their own path, like `blocks`
    facts: dict[str, int] = field(default_factory=dict)  # sizes for checks and estimates: heads, vocab_size, ...

    def init(self, name: str) -> Init:
        """Return the initialization rule of the parameter `name`. Raises LookupError if no rule matches it."""
        for rule in self.inits:
            if matches(rule.pattern, name):
                return rule
        raise LookupError(f"the plan has no Init for parameter {name!r}")

    def get_shard_rules(self, name: str, dims: int) -> dict[str, ShardRule]:
        """Return axis -> rule that shards the parameter `name` of `dims` dims; other axes do not shard the parameter.

        For each axis only the first matching rule counts, even if the rule is `ShardRule.replicated` or the parameter
        lacks the rule's dim (the bias of a rowwise layer). A tied parameter follows the rules of the stored parameter.
        """
        name, rules = self.get_owner(name), dict[str, ShardRule]()
        for rule in self.sharding:
            if matches(rule.pattern, name):
                if rule.axis == EVERY_AXIS:
                    break
                rules.setdefault(rule.axis, rule)
        return {axis: rule for axis, rule in rules.items() if rule.dim < dims}

    def is_frozen(self, name: str) -> bool:
        """Return whether the parameter `name` is not trained; a tied parameter follows the stored parameter.

        The most specific of all matching patterns in `frozen` and `trained` decides: most components, then fewest
        stars. If a pattern of each list is equally specific, the parameter is trained.
        """
        name = self.get_owner(name)
        frozen_specificity, trained_specificity = (
            max((_rank_specificity(pattern) for pattern in patterns if matches(pattern, name)), default=None)
            for patterns in (self.frozen, self.trained)
        )
        return frozen_specificity is not None and (
            trained_specificity is None or frozen_specificity > trained_specificity
        )

    def find_low_bit(self, name: str) -> LowBit | None:
        """Return the storage rule of the parameter `name`; for scales, the rule of their weight. None: no rule."""
        name = self.get_owner(name)
        if self.is_scales(name):
            name = f"{name.removesuffix(SCALES)}.weight"
        return next((rule for rule in self.low_bit if matches(rule.pattern, name)), None)

    def is_scales(self, name: str) -> bool:
        """Return whether the parameter `name` holds the quantization scales of a weight."""
        if not self.low_bit or not name.endswith(SCALES):
            return False
        weight = f"{name.removesuffix(SCALES)}.weight"
        return any(rule.dtype == "int8" and matches(rule.pattern, weight) for rule in self.low_bit)

    def get_dtype(self, name: str) -> str | None:
        """Return the storage dtype of the parameter `name`; None for the precision's `param_dtype`."""
        rule = self.find_low_bit(name)
        return None if rule is None else "float32" if self.is_scales(self.get_owner(name)) else rule.dtype

    def computes_as_stored(self, name: str) -> bool:
        """Return whether modules compute with the parameter `name` as it is stored: in the master dtype or as codes."""
        rule = self.find_low_bit(name)
        return any(matches(pattern, name) for pattern in self.master_dtype) or (
            rule is not None and rule.dtype == "int8"
        )

    def get_emit_path(self, path: str) -> str:
        """Return the path under which the module at `path` emits metrics: its block's path, "" outside of blocks."""
        for pattern in (f"{self.blocks}.*", *self.head_blocks):
            if matches(pattern, path):
                return ".".join(path.split(".")[: pattern.count(".") + 1])
        return ""

    def list_blocks_in_head(self, paths: Iterable[str]) -> list[str]:
        """Select the blocks inside the head from `paths` of modules or nodes; keep their order."""
        return [path for path in paths if any(names(pattern, path) for pattern in self.head_blocks)]

    def get_owner(self, name: str) -> str:
        """Return the name of the stored parameter: `name` itself, unless the parameter is tied to another one."""
        return dict(self.tied).get(name, name)

    def find_unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the plan's patterns that match no parameter in `names`: mistakes of the plan's author."""
        all_names = [*names, *(alias for alias, _ in self.tied)]
        patterns = [rule.pattern for rules in (self.sharding, self.inits) for rule in rules]
        patterns += [*self.frozen, *self.trained, *(rule.pattern for rule in self.low_bit)]
        return [pattern for pattern in dict.fromkeys(patterns) if not any(matches(pattern, name) for name in all_names)]

    def extend(self, **more: tuple) -> Plan:
        """Return a copy with new rules before the existing rules, so that the rules of an edit win."""
        return replace(self, **{key: value + getattr(self, key) for key, value in more.items()})
