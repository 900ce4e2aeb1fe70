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

    forward    matmul -> calls per forward pass. Backward computes an input gradient of equal FLOPs for each call
    weights    matmul -> number of its weight gradients that a backward pass computes
    again      matmul -> calls that a backward pass recomputes
    kept       bytes that the forward pass writes and saves, without savings by recomputation
    kept_again bytes of `kept` that the backward pass writes again
    modules    number of modules that a forward pass calls; modules_again: number that the backward pass calls again
    unknown    paths of nodes whose matmuls or activations are unknown
    unknown_flops  FLOPs of a forward pass of the unknown nodes, by `Node.count_flops`
    """

    forward: Mapping[AnyMatmul, int] = field(default_factory=Counter)
    weights: Mapping[AnyMatmul, int] = field(default_factory=Counter)
    again: Mapping[AnyMatmul, int] = field(default_factory=Counter)
    kept: int = 0
    kept_again: int = 0
    modules: int = 0
    modules_again: int = 0
    unknown: tuple[str, ...] = ()
    unknown_flops: int = 0

    @staticmethod
    def add_up(parts: Iterable[StageWork]) -> StageWork:
        """Return the sum of `parts`."""
        forward, weights, again = Counter[AnyMatmul](), Counter[AnyMatmul](), Counter[AnyMatmul]()
        times = Counter(map(id, part_list := list(parts)))
        sums = Counter[str]()
        unknown: list[str] = []
        for part in {id(part): part for part in part_list}.values():
            count = times[id(part)]
            for into, matmuls in ((forward, part.forward), (weights, part.weights), (again, part.again)):
                for matmul, often in matmuls.items():
                    into[matmul] += count * often
            for name in ("kept", "kept_again", "modules", "modules_again", "unknown_flops"):
                sums[name] += count * getattr(part, name)
            unknown += part.unknown
        return StageWork(forward, weights, again, unknown=tuple(unknown), **sums)

    def recompute(self, attention_only: bool = False) -> StageWork:
        """Return the work with recomputation in the backward pass: full, or (`attention_only`) of attention."""
        if attention_only:
            again: dict[AnyMatmul, int] = {
                matmul: times for matmul, times in self.forward.items() if isinstance(matmul, AttentionMatmuls)
            }
            return replace(self, again=again)
        return replace(self, again=self.forward, kept_again=self.kept, modules_again=self.modules)

    def add_recomputed(self, part: StageWork) -> StageWork:
        """Return this work with the recomputation of `part` added; part: a result of `recompute`."""
        again = Counter[AnyMatmul](self.again)
        again.update(part.again)
        return replace(
            self,
            again=again,
            kept_again=self.kept_again + part.kept_again,
            modules_again=self.modules_again + part.modules_again,
        )

    @cached_property
    def flops(self) -> int:
        """FLOPs of a forward pass, by MFU's convention."""
        return sum(matmul.flops * times for matmul, times in self.forward.items()) + self.unknown_flops
