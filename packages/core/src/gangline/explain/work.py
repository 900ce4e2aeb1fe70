"""What a node and all in it compute on a rank: their products after every cut, and what their forward pass keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from gangline.model.flops import computes_frozen
from gangline.model.linear_nodes import LinearNode
from gangline.model.local_sizes import LocalSizes
from gangline.model.products import AttentionProduct, MatrixProduct, Product
from gangline.model.tree import Node, iterate_children, iterate_nodes
from gangline.plan import Plan


@dataclass(frozen=True)
class StageWork:
    """The work of one microbatch on one stage, on one rank.

    forward    product -> how often. The backward pass has for each the gradient of what goes in, as large, and ...
    weights    product -> how often the gradient of its weight is computed, too
    again      product -> how often the backward pass computes it a second time (recomputation)
    kept       bytes that the forward pass makes and keeps, before recomputation drops any of them
    kept_again bytes of them that the backward pass makes a second time
    modules    that a forward pass calls, and again in the backward pass (`modules_again`)
    unknown    paths of nodes that do not say what they multiply, or say nothing at all
    unknown_flops  operations of a forward pass that these claim
    """

    forward: Mapping[Product, int] = field(default_factory=Counter)
    weights: Mapping[Product, int] = field(default_factory=Counter)
    again: Mapping[Product, int] = field(default_factory=Counter)
    kept: int = 0
    kept_again: int = 0
    modules: int = 0
    modules_again: int = 0
    unknown: tuple[str, ...] = ()
    unknown_flops: int = 0

    @staticmethod
    def add_up(parts: Iterable[StageWork]) -> StageWork:
        """All of these together."""
        forward, weights, again = Counter[Product](), Counter[Product](), Counter[Product]()
        times = Counter(map(id, listed := list(parts)))
        sums = Counter[str]()
        unknown: list[str] = []
        for part in {id(part): part for part in listed}.values():
            count = times[id(part)]
            for into, products in ((forward, part.forward), (weights, part.weights), (again, part.again)):
                for product, often in products.items():
                    into[product] += count * often
            for name in ("kept", "kept_again", "modules", "modules_again", "unknown_flops"):
                sums[name] += count * getattr(part, name)
            unknown += part.unknown
        return StageWork(forward, weights, again, unknown=tuple(unknown), **sums)

    def recompute(self, attention_only: bool = False) -> StageWork:
        """The same, computed again in the backward pass: all of it, or attention alone."""
        if attention_only:
            again: dict[Product, int] = {
                product: times for product, times in self.forward.items() if isinstance(product, AttentionProduct)
            }
            return replace(self, again=again)
        return replace(self, again=self.forward, kept_again=self.kept, modules_again=self.modules)

    def add_recomputed(self, part: StageWork) -> StageWork:
        """The same, where a part of it is computed again as `part.recompute` has it."""
        again = Counter[Product](self.again)
        again.update(part.again)
        return replace(
            self,
            again=again,
            kept_again=self.kept_again + part.kept_again,
            modules_again=self.modules_again + part.modules_again,
        )

    @cached_property
    def flops(self) -> int:
        """Of a forward pass, as MFU counts them."""
        return sum(product.flops * times for product, times in self.forward.items()) + self.unknown_flops


def count_work(
    node: Node, path: str, plan: Plan, sizes: LocalSizes, *, sequence_length: int, ulysses: bool = False
) -> StageWork:
    """Of the node at `path` and all in it, nothing recomputed and nothing kept yet.

    sizes: those of a rank. A product that tp cuts has all tokens between products (`inner_tokens`), any other those of
    the residual stream. A node whose products do not come to the operations that it claims is unknown,
    and one that has no child and says neither parameters nor what it keeps.
    ulysses: cp trades tokens for heads, so that attention sees whole sequences; else a rank has its queries alone.
    """
    tp, cp = sizes.size("tp"), sizes.size("cp")
    sequences = max(1, sizes.inner_tokens * cp // sequence_length)
    tokens = sequences * sequence_length
    whole = replace(sizes, tokens=tokens, inner_tokens=tokens, ranks={})
    forward: Counter[Product] = Counter()
    weights: Counter[Product] = Counter()
    unknown, unknown_flops, modules = [], 0, 0
    for at, inner in iterate_nodes(node, path):
        modules += 1
        said = inner.list_products(whole, sequence_length)
        claimed = inner.count_flops(sequence_length) * tokens
        silent = not claimed and not inner.get_shapes() and next(iterate_children(inner), None) is None
        if silent and inner.count_activation_bytes(whole) is None:
            unknown.append(at)
        if said is None or abs(sum(product.flops for product in said) - claimed) > 0.01 * claimed:
            if claimed:
                unknown.append(at)
                unknown_flops += claimed * sizes.inner_tokens // tokens // tp
            continue
        frozen = computes_frozen(at, inner, plan)
        for product in said:
            local: Product
            if isinstance(product, AttentionProduct):
                trades = ulysses and product.heads % (tp * cp) == 0  # where heads do not divide, as much on average
                share = tp * cp if trades else tp
                local = replace(
                    product,
                    sequences=sequences,
                    queries=sequence_length if trades else sequence_length // cp,
                    heads=max(1, product.heads // share),
                    kv_heads=max(1, product.kv_heads // share),
                )
            else:
                local = _cut(product, f"{at}.{product.weight}" if at else product.weight, inner, plan, sizes, tokens)
            forward[local] += 1
            if not frozen and isinstance(local, MatrixProduct):
                weights[local] += 1
    return StageWork(forward, weights, modules=modules, unknown=tuple(unknown), unknown_flops=unknown_flops)


def _cut(product: MatrixProduct, name: str, node: Node, plan: Plan, sizes: LocalSizes, tokens: int) -> MatrixProduct:
    """A product on one rank: its columns or its inner dim cut by tp, its matrices by what they lie on."""
    shape = node.get_shapes()[product.weight]
    cuts = plan.get_cuts(name, len(shape))
    parallel = sizes.size("tp") > 1 and "tp" in cuts
    rows = product.rows * (sizes.inner_tokens if parallel else sizes.tokens) // tokens
    inner, columns, matrices = product.inner, product.columns, product.matrices
    for axis, cut in cuts.items():
        ranks = sizes.size(axis)
        if ranks == 1:
            continue
        if cut.dim == len(shape) - 1:
            inner = max(1, inner // ranks)
        elif cut.dim == len(shape) - 2:
            columns = -(-columns // ranks)
        else:
            matrices = max(1, matrices // ranks)
    return replace(
        product,
        rows=rows,
        inner=inner,
        columns=columns,
        matrices=matrices,
        weight="weight",
        block=name.startswith(f"{plan.blocks}.") or (bool(plan.head_blocks) and isinstance(node, LinearNode)),
    )
