"""Work of one microbatch on one stage: matmuls, and the bytes that the forward pass saves. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from gangline.model.matmuls import AnyMatmul, AttentionMatmuls


@dataclass(frozen=True)
class StageWork:
    """The work of one microbatch on one stage, on one rank.

    forward             matmul -> calls per forward pass. Backward computes an input gradient of equal FLOPs per call
    weights             matmul -> number of its weight gradients that a backward pass computes
    recompute           matmul -> calls that a backward pass recomputes
    saved_bytes         bytes that the forward pass writes and saves, without savings by recomputation
    resaved_bytes       bytes of `saved_bytes` that the backward pass writes again
    modules             number of modules that a forward pass calls
    recomputed_modules  number of modules that a backward pass calls again
    unknown             paths of nodes whose matmuls or activations are unknown
    unknown_flops       FLOPs of a forward pass of the unknown nodes, by `Node.count_flops`
    """

    forward: Mapping[AnyMatmul, int] = field(default_factory=Counter)
    weights: Mapping[AnyMatmul, int] = field(default_factory=Counter)
    recompute: Mapping[AnyMatmul, int] = field(default_factory=Counter)
    saved_bytes: int = 0
    resaved_bytes: int = 0
    modules: int = 0
    recomputed_modules: int = 0
    unknown: tuple[str, ...] = ()
    unknown_flops: int = 0

    @staticmethod
    def add_up(parts: Iterable[StageWork]) -> StageWork:
        """Return the sum of `parts`."""
        forward, weights, recompute = Counter[AnyMatmul](), Counter[AnyMatmul](), Counter[AnyMatmul]()
        times = Counter(map(id, part_list := list(parts)))
        sums = Counter[str]()
        unknown: list[str] = []
        for part in {id(part): part for part in part_list}.values():
            count = times[id(part)]
            for into, matmuls in ((forward, part.forward), (weights, part.weights), (recompute, part.recompute)):
                for matmul, often in matmuls.items():
                    into[matmul] += count * often
            for name in ("saved_bytes", "resaved_bytes", "modules", "recomputed_modules", "unknown_flops"):
                sums[name] += count * getattr(part, name)
            unknown += part.unknown
        return StageWork(forward, weights, recompute, unknown=tuple(unknown), **sums)

    def apply_recompute(self, attention_only: bool = False) -> StageWork:
        """Return the work with recomputation in the backward pass: full, or (`attention_only`) of attention."""
        if attention_only:
            recompute: dict[AnyMatmul, int] = {
                matmul: times for matmul, times in self.forward.items() if isinstance(matmul, AttentionMatmuls)
            }
            return replace(self, recompute=recompute)
        return replace(self, recompute=self.forward, resaved_bytes=self.saved_bytes, recomputed_modules=self.modules)

    def add_recomputed(self, part: StageWork) -> StageWork:
        """Return this work with the recomputation of `part` added; part: a result of `apply_recompute`."""
        recompute = Counter[AnyMatmul](self.recompute)
        recompute.update(part.recompute)
        return replace(
            self,
            recompute=recompute,
            resaved_bytes=self.resaved_bytes + part.resaved_bytes,
            recomputed_modules=self.recomputed_modules + part.recomputed_modules,
        )

    @cached_property
    def flops(self) -> int:
        """FLOPs of a forward pass, by MFU's convention."""
        return sum(matmul.flops * times for matmul, times in self.forward.items()) + self.unknown_flops
