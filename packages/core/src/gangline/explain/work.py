"""The work of one microbatch on one stage: its products, and what its forward pass keeps. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from gangline.model.products import AttentionProduct, Product


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
    def total(parts: Iterable[StageWork]) -> StageWork:
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
