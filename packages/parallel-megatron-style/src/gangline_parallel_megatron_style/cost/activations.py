"""What the forward pass of one microbatch keeps for the backward pass on one rank: core's count of each node
(`gangline.explain.activations`) on this layout.
"""

from __future__ import annotations

from gangline.config import Recompute
from gangline.explain import ActivationSizes, of_angles, of_head, of_node, recomputed_attention
from gangline_parallel_megatron_style.cost.case import Case


def sizes_of(case: Case, gpu: bool = True) -> ActivationSizes:
    """What a rank's modules compute with; `gpu`: with the kernels of one."""
    ulysses = case.cp if case.config.context == "ulysses" else 1
    return ActivationSizes(local=case.sizes, gpu=gpu, plan=case.plan, ulysses=ulysses)


def of_block(case: Case, index: int, sizes: ActivationSizes) -> int:
    """Kept by a block until its backward pass, as the run recomputes it."""
    key = ("of_block", sizes.gpu, *case.kind(index))
    if key not in case.known:
        case.known[key] = _of_block(case, index, sizes)
    return int(case.known[key])


def whole_block(case: Case, index: int, sizes: ActivationSizes) -> int:
    """Kept by a block where nothing of it is recomputed."""
    key = ("whole_block", sizes.gpu, case.kind(index)[0])
    if key not in case.known:
        case.known[key] = of_node(case.blocks[index], sizes, f"{case.plan.blocks}.{index}")
    return int(case.known[key])


def _of_block(case: Case, index: int, sizes: ActivationSizes) -> int:
    node, whole = case.blocks[index], whole_block(case, index, sizes)
    if not case.recomputed(index):
        return whole
    if case.recompute is Recompute.full:
        return min(whole, sizes.tokens * case.width * sizes.itemsize)
    return whole - recomputed_attention(node, sizes)


def angles(case: Case, sizes: ActivationSizes, stage: int | None = None) -> int:
    """cos and sin of every position, which blocks of a stage share that rotate alike; None: of all stages."""
    of = range(len(case.blocks)) if stage is None else case.stages[stage]
    kinds = frozenset(case.model.kinds[index] for index in of)
    key = ("angles", sizes.gpu, kinds)
    if key not in case.known:
        case.known[key] = of_angles([case.blocks[kind] for kind in kinds], sizes)
    return int(case.known[key])


def head(case: Case, sizes: ActivationSizes) -> dict[str, int]:
    """The last norm's input and output; logits with their log-sum-exp; and what the loss's backward pass takes."""
    return of_head(case.plan, case.width, sizes, case.by_path[case.plan.head])
