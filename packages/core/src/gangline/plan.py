"""How a model may be cut: torch-free data that lies beside the model's configuration.

A strategy reads the plan and nothing else about a model; a model knows nothing of ranks. The words
`cut_colwise` and `cut_rowwise` mean what colwise and rowwise mean in transformers' `base_model_tp_plan`.

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
NO_DIM = sys.maxsize  # a dim that no array has
SCALES = ".scales"  # how the name ends of what lies beside codes


@lru_cache(maxsize=4096)
def _compile_regex(pattern: str) -> re.Pattern[str]:
    return re.compile("(" + re.escape(pattern).replace(r"\*", r"[^.]+") + r")(\..+)?")


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names `name` itself, or a module around it."""
    return _compile_regex(pattern).fullmatch(name) is not None


def names(pattern: str, name: str) -> bool:
    """Whether `name` is what `pattern` names, and not a thing inside it."""
    found = _compile_regex(pattern).fullmatch(name)
    return found is not None and found[2] is None


def parse_block_number(path: str) -> int:
    """The number of the block at `path`: the last in it. Raises StopIteration where there is none."""
    return next(int(part) for part in reversed(path.split(".")) if part.isdecimal())


def _rank_specificity(pattern: str) -> tuple[int, int]:
    return pattern.count("."), -pattern.count("*")


def choose_by_pattern(values: Mapping[str, V], name: str, default: V) -> V:
    """Of values by pattern, the one for `name`: of the most specific pattern that matches, of these the first.

    The most specific has most components, of these the fewest stars.
    """
    found = [pattern for pattern in values if matches(pattern, name)]
    return values[max(found, key=_rank_specificity)] if found else default


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix, or a stack of them. A stack of biases is one of vectors."""
    return len(shape) >= 2 and not name.endswith(".bias")


def is_mapped(name: str, shape: Sequence[int]) -> bool:
    """Whether optimizers that map whole matrices take a parameter: both sides of its matrices are longer than 1.

    Filters of a depthwise convolution, (channels, 1, taps), are vectors to them.
    """
    return is_matrix(name, shape) and min(shape[-2:]) > 1


@dataclass(frozen=True)
class Cut:
    """Parameters matching `pattern` may be cut along tensor dim `dim` by mesh (or fold) axis `axis`.

    `unit`: rows that stay together (the width of a head). Which rule counts says `Plan.get_cuts`; a pattern of a module
    covers all that lies in it, also what an edit adds there. Raises ValueError for a negative dim, an empty unit, and
    one dim cut by every axis.
    """

    pattern: str
    dim: int
    axis: str = "tp"
    unit: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0 or self.unit < 1:
            raise ValueError(f"the cut of {self.pattern}: dim={self.dim} counts from 0, unit={self.unit} from 1")
        if self.axis == EVERY_AXIS and self.dim != NO_DIM:
            raise ValueError(f"the cut of {self.pattern}: one dim cannot be cut by every axis; Cut.whole cuts none")

    @classmethod
    def cut_colwise(cls, pattern: str, unit: int = 1) -> Cut:
        """Y = X Wᵀ with W (out, in) cut along its outputs."""
        return cls(pattern, 0, "tp", unit)

    @classmethod
    def cut_rowwise(cls, pattern: str, unit: int = 1) -> Cut:
        """Y = X Wᵀ with W (out, in) cut along its inputs: partial sums to be added."""
        return cls(pattern, 1, "tp", unit)

    @classmethod
    def whole(cls, pattern: str, axis: str = EVERY_AXIS) -> Cut:
        """Not cut, along `axis` or along every axis, whatever a later rule says."""
        return cls(pattern, NO_DIM, axis)


@dataclass(frozen=True)
class Fold:
    """An axis made of ranks of other axes: `name` of `size` ranks, taken out of `out_of`, fastest first."""

    name: str
    size: int
    out_of: tuple[str, ...]

    def list_ranks(self, mesh: Mesh, rank: int) -> list[int]:
        """The ranks of the fold that `rank` is in, in order; itself alone where the mesh has none of the fold's axes.

        The ranks along those axes, in mesh order, are dealt out in runs of `size`: neighbours on the fastest axes make
        a fold. Raises ValueError where they do not divide by it.
        """
        joint, together = self._place(mesh, rank)
        first = joint - joint % self.size
        return self._list_ranks_at(mesh, rank, range(first, min(first + self.size, together)))

    def list_rest_ranks(self, mesh: Mesh, rank: int) -> list[int]:
        """The ranks with the same place in their folds as `rank`, in order. Raises ValueError like `list_ranks`."""
        joint, together = self._place(mesh, rank)
        return self._list_ranks_at(mesh, rank, range(joint % self.size, together, self.size))

    def _place(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """(the joint index of `rank` along the fold's axes, how many ranks are along them)."""
        axes = self._list_axes(mesh)
        together = mesh.size(*axes)
        if together > 1 and together % self.size:
            raise ValueError(
                f"{self.name}={self.size} must divide the {together} ranks along {' x '.join(axes)}, its axes"
            )
        return mesh.index(mesh.coordinate(rank), axes), together

    def _list_ranks_at(self, mesh: Mesh, rank: int, joints: Iterable[int]) -> list[int]:
        axes, coordinate = self._list_axes(mesh), mesh.coordinate(rank)
        return [mesh.rank({**coordinate, **mesh.coordinate_along(axes, joint)}) for joint in joints]

    def _list_axes(self, mesh: Mesh) -> tuple[str, ...]:
        return tuple(axis for axis in mesh.axes if axis in self.out_of)


@dataclass(frozen=True)
class Init:
    """How parameters matching `pattern` are drawn; the first match counts.

    distribution: "normal" (std `scale`), "uniform" (in ±`scale`), "constant" (all `scale`).
    """

    pattern: str
    distribution: Literal["normal", "uniform", "constant"]
    scale: float = 1.0


@dataclass(frozen=True)
class Name:
    """The external name of a parameter. `{0}`, `{1}` in `theirs` take what the stars of `pattern` matched.

    how: "same", or "transpose" for a matrix that lies the other way there (of a stack of them, each), or "stack": ours
    is (N, ...) and theirs are N arrays, `{n}` in `theirs` counts them. An empty `theirs`: a buffer that they have
    nothing like.
    rows: (first, of): ours are the rows from `first` on of theirs, which has so many and is shared by several of ours
    (queries, keys and values in one matrix); of a transposed one they are its columns. None: theirs is ours alone.
    every: with n, rows first, first + n, ... are ours; those between belong to n - 1 other parameters of this length.
    dim: the dim of ours that `rows` counts along.
    optional: files may lack theirs; ours is then drawn.
    unread: files may hold theirs although the model has no such parameter: this "tensor" alone (a mask), or the whole
    "layer" behind the last block that holds it.
    """

    pattern: str
    theirs: str
    how: Literal["same", "transpose", "stack"] = "same"
    rows: tuple[int, int] | None = None
    every: int = 1
    dim: int = 0
    optional: bool = False
    unread: Literal["", "tensor", "layer"] = ""

    def translate(self, name: str) -> str | None:
        """Their name of our parameter `name`, or None where the pattern is not about it."""
        found = re.fullmatch(re.escape(self.pattern).replace(r"\*", r"([^.]+)"), name)
        return None if found is None else self.theirs.format(*found.groups(), n="{n}")


@dataclass(frozen=True)
class Kept:
    """Frozen parameters matching `pattern` are kept in fewer bits, whatever the precision.

    bfloat16  instead of the precision's master weights
    int8      a matrix W (out, in) of a linear as codes; beside it lies `scales` (out, in / block), float32, one for
              each `block` neighbours of a row. The module multiplies with the two as they are
    codes     "package.module:function", called with (shard, plan, fill): fills the shard of codes or scales, where
              `fill` fills one with the weight as it is

    Raises ValueError for codes without a block, or without what makes them.
    """

    pattern: str
    dtype: Literal["bfloat16", "int8"]
    block: int = 0
    codes: str = ""

    def __post_init__(self) -> None:
        if {self.dtype == "int8", self.block > 0, bool(self.codes)} == {True, False}:
            raise ValueError(f"{self.pattern} is kept in {self.dtype}, in blocks of {self.block}, by {self.codes!r}")


@dataclass(frozen=True)
class Seam:
    """A place where a strategy may step in: the modules matching `pattern` call their attribute `name`.

    Calls are fixed:
      attention(q, k, v, document, position) -> out     q (B, H, T, C), k and v (B, K, T, C), after rotation
      loss(hidden, weight, targets, loss_mask) -> sum   hidden (B, T, D), weight (V, D), targets and loss_mask (B, T)

    What the call computes is data of the node there (`Node.get_seams`), and what is put there says the same of itself,
    as its attribute `computes`. A strategy that puts its own call there computes just that, or refuses.
    """

    name: Literal["attention", "loss"]
    pattern: str


@dataclass(frozen=True)
class Plan:
    """The whole plan of one model."""

    embed: str  # the module (batch) -> hidden
    blocks: str  # the ModuleList of (hidden, batch) -> hidden
    head: str  # the module (hidden, batch) -> loss sum
    layers: int  # how many blocks
    cuts: tuple[Cut, ...] = ()
    inits: tuple[Init, ...] = ()
    names: tuple[Name, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()  # (alias, the name it is kept under)
    seams: tuple[Seam, ...] = ()
    folds: tuple[Fold, ...] = ()
    master_dtype: tuple[str, ...] = ()  # modules whose parameters are always computed in the master dtype (a router)
    partial_grad: tuple[str, ...] = ()  # not cut by `tp`, on activations that are: gradients are summed over tp
    frozen: tuple[str, ...] = ()  # what is not trained: kept and saved, with neither gradient nor moments
    kept: tuple[Kept, ...] = ()  # what of that is kept in fewer bits
    trained: tuple[str, ...] = ()  # what is trained inside of that; of all that match the most specific pattern decides
    head_blocks: tuple[str, ...] = ()  # further blocks, inside the head: they emit under their own path, as `blocks` do
    facts: dict[str, int] = field(default_factory=dict)  # sizes a layout must divide: heads, kv_heads, vocab_size, ...

    def init(self, name: str) -> Init:
        """How the parameter `name` is drawn. Raises LookupError where the plan does not say."""
        for rule in self.inits:
            if matches(rule.pattern, name):
                return rule
        raise LookupError(f"the plan has no Init for parameter {name!r}")

    def get_cuts(self, name: str, dims: int) -> dict[str, Cut]:
        """Axis -> how it cuts the parameter `name` of so many dims; an axis that is not there leaves it whole.

        For each axis the first rule that matches decides, and no later one, also where it says `Cut.whole` or where the
        parameter lacks its dim (the bias of a rowwise layer). A tied parameter is cut as the one it is kept under.
        """
        name, found = self.get_owner(name), dict[str, Cut]()
        for cut in self.cuts:
            if matches(cut.pattern, name):
                if cut.axis == EVERY_AXIS:
                    break
                found.setdefault(cut.axis, cut)
        return {axis: cut for axis, cut in found.items() if cut.dim < dims}

    def is_frozen(self, name: str) -> bool:
        """Whether the parameter `name` is not trained; a tied one as the one it is kept under.

        Of all patterns of `frozen` and `trained` that match, the most specific decides: the one of most components, of
        these the one with fewest stars. Where one of each kind is as specific, it is trained.
        """
        name = self.get_owner(name)
        frozen, trained = (
            max((_rank_specificity(pattern) for pattern in patterns if matches(pattern, name)), default=None)
            for patterns in (self.frozen, self.trained)
        )
        return frozen is not None and (trained is None or frozen > trained)

    def find_kept(self, name: str) -> Kept | None:
        """How the parameter `name`, or the weight that it is the scales of, is kept; None: as the precision says."""
        name = self.get_owner(name)
        if self.is_scales(name):
            name = f"{name.removesuffix(SCALES)}.weight"
        return next((rule for rule in self.kept if matches(rule.pattern, name)), None)

    def is_scales(self, name: str) -> bool:
        """Whether the parameter `name` is the scales of codes."""
        if not self.kept or not name.endswith(SCALES):
            return False
        weight = f"{name.removesuffix(SCALES)}.weight"
        return any(rule.dtype == "int8" and matches(rule.pattern, weight) for rule in self.kept)

    def get_dtype(self, name: str) -> str | None:
        """The dtype that the parameter `name` is kept in, whatever the precision; None: that of master weights."""
        rule = self.find_kept(name)
        return None if rule is None else "float32" if self.is_scales(self.get_owner(name)) else rule.dtype

    def computes_as_kept(self, name: str) -> bool:
        """Whether modules compute with the parameter `name` as it is kept: in the master dtype, or with codes."""
        rule = self.find_kept(name)
        return any(matches(pattern, name) for pattern in self.master_dtype) or (
            rule is not None and rule.dtype == "int8"
        )

    def get_emit_path(self, path: str) -> str:
        """The path under which the module at `path` emits: that of the block around it; "" outside of blocks."""
        for pattern in (f"{self.blocks}.*", *self.head_blocks):
            if matches(pattern, path):
                return ".".join(path.split(".")[: pattern.count(".") + 1])
        return ""

    def list_blocks_in_head(self, paths: Iterable[str]) -> list[str]:
        """Of the paths of modules (or nodes) those of blocks inside the head, in order."""
        return [path for path in paths if any(names(pattern, path) for pattern in self.head_blocks)]

    def get_owner(self, name: str) -> str:
        """The name a parameter is kept under: itself, unless it is tied to another."""
        return dict(self.tied).get(name, name)

    def find_unmatched(self, names: Iterable[str]) -> list[str]:
        """Patterns that match none of `names`: mistakes of the plan's author."""
        known = [*names, *(alias for alias, _ in self.tied)]
        patterns = [rule.pattern for rules in (self.cuts, self.inits) for rule in rules]
        patterns += [*self.frozen, *self.trained, *(rule.pattern for rule in self.kept)]
        return [pattern for pattern in dict.fromkeys(patterns) if not any(matches(pattern, name) for name in known)]

    def extend(self, **more: tuple) -> Plan:
        """A copy with rules put before the present ones, so that an edit's own rules win."""
        return replace(self, **{key: value + getattr(self, key) for key, value in more.items()})
