"""Activation memory: bytes that one microbatch's forward pass saves on a rank for the backward pass.

`gangline_basics.explain.activations` counts the bytes of each node, with the sizes of this layout.
"""

from __future__ import annotations

from gangline.config import Recompute
from gangline.model.tree import Node
from gangline_basics.explain.activations import (
    ActivationSizes,
    count_angles,
    count_head,
    count_node,
    count_recomputed_attention,
)
from gangline_parallel_megatron_style.cost.case import Case


def make_activation_sizes(case: Case, gpu: bool = True) -> ActivationSizes:
    """Return the sizes with which a rank's modules compute. `gpu`: whether modules run the kernels of a GPU."""
    ulysses = case.cp if case.config.context == "ulysses" else 1
    return ActivationSizes(local=case.sizes, gpu=gpu, plan=case.plan, ulysses=ulysses)


def count_block(case: Case, block: int | str, sizes: ActivationSizes) -> int:
    """Return the bytes that a block (index or path) saves for its backward pass, with the run's recomputation."""
    key = ("of_block", sizes.gpu, *_get_kind(case, block))
    if key not in case.known:
        case.known[key] = _count_block(case, block, sizes)
    return int(case.known[key])


def count_whole_block(case: Case, block: int | str, sizes: ActivationSizes) -> int:
    """Return the bytes that a block (index or path) saves for its backward pass without recomputation."""
    key = ("whole_block", sizes.gpu, _get_kind(case, block)[0])
    if key not in case.known:
        case.known[key] = count_node(*_locate(case, block, sizes))
    return int(case.known[key])


def _get_kind(case: Case, block: int | str) -> tuple[int | str, bool]:
    return case.get_kind(block) if isinstance(block, int) else (block, case.is_recomputed(block))


def _locate(case: Case, block: int | str, sizes: ActivationSizes) -> tuple[Node, ActivationSizes, str]:
    if isinstance(block, str):
        return case.head_blocks[block], sizes, block
    return case.blocks[block], sizes, f"{case.plan.blocks}.{block}"


def _count_block(case: Case, block: int | str, sizes: ActivationSizes) -> int:
    whole = count_whole_block(case, block, sizes)
    if not case.is_recomputed(block):
        return whole
    if case.recompute is Recompute.full:
        return min(whole, sizes.tokens * case.width * sizes.itemsize)
    return whole - count_recomputed_attention(_locate(case, block, sizes)[0], sizes)


def count_angle_bytes(case: Case, sizes: ActivationSizes, stage: int | None = None) -> int:
    """Return the bytes of cos and sin of all positions; blocks with equal rotary embeddings share them.

    stage: index of the pipeline stage whose blocks count; None: all stages
    """
    of = range(len(case.blocks)) if stage is None else case.stages[stage]
    kinds = frozenset(case.model.kinds[index] for index in of)
    key = ("angles", sizes.gpu, kinds)
    if key not in case.known:
        case.known[key] = count_angles([case.blocks[kind] for kind in kinds], sizes)
    return int(case.known[key])


def count_head_bytes(case: Case, sizes: ActivationSizes) -> dict[str, int]:
    """Return the head's memory, kind -> bytes.

    "activations": input and output of the last norm; "logits": logits, log-sum-exp, and the backward pass of the loss
    """
    block_bytes = {path: count_block(case, path, sizes) for path in case.head_blocks}
    return count_head(case.plan, case.width, sizes, case.by_path[case.plan.head], block_bytes)
