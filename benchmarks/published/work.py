"""Edit the work of a stage: computation, saved bytes and kernel launches that only other software has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from gangline.explain.explained import Explained
from gangline.explain.work import StageWork
from gangline.model.matmuls import AnyMatmul, AttentionMatmuls, Matmul

LATENT = {1536, 512}  # ranks of the latents of DeepSeek-V3's queries, and of its keys and values

Matmuls = Mapping[AnyMatmul, int]


def with_second_head(work: StageWork) -> StageWork:
    """Add a second head, and a matmul of the hidden state with the embedding of the next token before it."""
    more: Counter[AnyMatmul] = Counter()
    for matmul in work.forward:
        if isinstance(matmul, Matmul) and not matmul.block:
            more[matmul] += 1
            more[replace(matmul, inner=2 * matmul.inner, columns=matmul.inner, block=True)] += 1
    return replace(work, forward=Counter(work.forward) + more, weights=Counter(work.weights) + more)


def without_end_blocks(found: Explained) -> Explained:
    """Remove the blocks of the first and the last stage, so that only the embedding and the head are left.

    Each of them counts as a block (Megatron-LM, --account-for-embedding-in-pipeline-split and
    --account-for-loss-in-pipeline-split).
    """
    first, block, last = found.work[0], found.work[1], found.work[-1]

    def end(work: StageWork) -> StageWork:
        return replace(
            work,
            forward=Counter(work.forward) - Counter(block.forward),
            weights=Counter(work.weights) - Counter(block.weights),
            recompute=Counter(work.recompute) - Counter(block.recompute),
            saved_bytes=max(0, work.saved_bytes - block.saved_bytes),
            resaved_bytes=max(0, work.resaved_bytes - block.resaved_bytes),
            modules=max(1, work.modules - block.modules),
            recomputed_modules=max(0, work.recomputed_modules - block.recomputed_modules),
        )

    return replace(found, work=(end(first), *found.work[1:-1], end(last)))


def recompute_experts(work: StageWork) -> StageWork:
    """Recompute the experts, the shared experts (which are twice as wide), and attention."""
    widths = {matmul.columns for matmul, _ in _of_experts(work)}
    shared = {2 * min(widths)} if widths else set[int]()

    def chosen(matmul: AnyMatmul) -> bool:
        if isinstance(matmul, Matmul):
            return matmul.matrices > 1 or bool({matmul.inner, matmul.columns} & shared)
        return isinstance(matmul, AttentionMatmuls)

    return _recompute(work, chosen)


def recompute_latents(work: StageWork) -> StageWork:
    """Recompute queries, keys and values from their latents."""
    return _recompute(work, lambda one: isinstance(one, Matmul) and one.inner in LATENT and one.matrices == 1)


def with_fp8_head(work: StageWork) -> StageWork:
    """Set the number format of blocks for the head too; routers are unchanged."""

    def edit(matmul: AnyMatmul) -> AnyMatmul:
        if isinstance(matmul, Matmul) and not matmul.block and matmul.columns > matmul.inner:
            return replace(matmul, block=True)
        return matmul

    return replace(
        work,
        forward=_edited(work.forward, edit),
        weights=_edited(work.weights, edit),
        recompute=_edited(work.recompute, edit),
    )


def with_fp8_attention(work: StageWork) -> StageWork:
    """Halve the head width, which halves the time of attention's matmuls, but not of its exponentials."""

    def edit(matmul: AnyMatmul) -> AnyMatmul:
        return replace(matmul, head_dim=matmul.head_dim // 2) if isinstance(matmul, AttentionMatmuls) else matmul

    return replace(work, forward=_edited(work.forward, edit), recompute=_edited(work.recompute, edit))


def with_casts(work: StageWork, itemsize: float) -> StageWork:
    """Save the input of each matmul twice, with one scale per block of elements (MXFP8, NVFP4).

    Blocks along rows are for the matmul, blocks along columns for the weight gradient (Transformer Engine,
    `MXFP8Quantizer`).
    """

    def cast(matmuls: Matmuls) -> int:
        own = [(p, n) for p, n in matmuls.items() if isinstance(p, Matmul) and p.block]
        least = min((n for _, n in own), default=1)
        # matmuls of keys and values, and of gate and up, read the same input
        inputs = ((p, n // 2 if n == 2 * least else n) for p, n in own)
        return int(2 * itemsize * sum(n * p.rows * p.inner for p, n in inputs))

    return replace(
        work, saved_bytes=work.saved_bytes + cast(work.forward), resaved_bytes=work.resaved_bytes + cast(work.recompute)
    )


def with_biases(work: StageWork) -> StageWork:
    """Add the biases of GPT-OSS's experts, as memory traffic.

    The bias of the down matmul is multiplied by the router's weight and added after the matmul, expert by expert, and
    the results are concatenated, in 32 bits (Megatron-Core, moe/experts.py, `_apply_bias`): for each element 28 bytes
    of memory traffic forward and 40 backward. The input of the gate, which is twice as wide, is clamped and
    concatenated first (fusions/fused_bias_geglu.py, `weighted_bias_quick_geglu_impl`): 8 and 10 bytes. The sum takes as
    long as 17 saved bytes.
    """
    numbers = sum(n * p.rows * p.columns for p, n in _of_experts(work)) // 3  # gate, up and down have equal sizes
    return replace(work, saved_bytes=work.saved_bytes + 17 * numbers)


def with_moved_rows(work: StageWork, times: int) -> StageWork:
    """Add separate kernels that sort tokens by expert before and after the dispatch, and back.

    Each of these kernels writes each row `times` more. The host launches the expert matmuls one by one (Megatron-Core,
    moe/token_dispatcher.py and `TEGroupedLinear`). In 8 bits, rows are sorted during the dispatch (HybridEP).
    """
    own = _of_experts(work)
    widest = max((matmul.inner for matmul, _ in own), default=0)
    moved = sum(2 * n * p.rows * p.inner for p, n in own if p.inner == widest) // 2  # gate and up read the same rows
    launches = sum(n * p.matrices for p, n in own) * 2 // 3  # gate and up are one matmul
    return replace(work, saved_bytes=work.saved_bytes + 2 * times * moved, modules=work.modules + launches)


def with_scores(work: StageWork) -> StageWork:
    """Replace fused attention by matmuls whose scores are written to memory, without skipping masked scores.

    The scores are the input and output of the softmax, the dropout mask and its output (arXiv 2205.05198, section 4.1:
    5 a s^2 b bytes).
    """

    def split(matmuls: Matmuls) -> tuple[Counter[AnyMatmul], int]:
        made, saved_bytes = Counter[AnyMatmul](), 0
        for matmul, times in matmuls.items():
            if not isinstance(matmul, AttentionMatmuls):
                made[matmul] += times
                continue
            pairs = matmul.sequences * matmul.heads
            rows, keys, width = pairs * matmul.queries, matmul.keys, matmul.head_dim
            for inner, columns in ((width, keys), (keys, width)):
                made[Matmul(rows=rows, inner=inner, columns=columns, matrices=pairs, block=False)] += times
            saved_bytes += 5 * pairs * matmul.queries * matmul.keys * times
        return made, saved_bytes

    (forward, saved_bytes), (recompute, resaved_bytes) = split(work.forward), split(work.recompute)
    scores = Counter({matmul: n for matmul, n in forward.items() if matmul not in work.forward})
    return replace(
        work,
        forward=forward,
        recompute=recompute,
        weights=Counter(work.weights) + scores,  # two gradients per matmul, as for a matmul with a weight
        saved_bytes=work.saved_bytes + saved_bytes,
        resaved_bytes=work.resaved_bytes + resaved_bytes,
    )


def _of_experts(work: StageWork) -> list[tuple[Matmul, int]]:
    return [(p, n) for p, n in work.forward.items() if isinstance(p, Matmul) and p.matrices > 1]


def _recompute(work: StageWork, chosen: Callable[[AnyMatmul], bool]) -> StageWork:
    more = Counter({matmul: n for matmul, n in work.forward.items() if chosen(matmul)})
    return replace(work, recompute=Counter(work.recompute) + more)


def _edited(matmuls: Matmuls, edit: Callable[[AnyMatmul], AnyMatmul]) -> Counter[AnyMatmul]:
    found: Counter[AnyMatmul] = Counter()
    for matmul, n in matmuls.items():
        found[edit(matmul)] += n
    return found
