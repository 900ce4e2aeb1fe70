"""What the software of a published row does beside a layout: what it overlaps, which kernels it fuses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gangline.explain.explained import Explained, Kernels, Transfer
from gangline.explain.work import StageWork
from gangline.model.products import AttentionProduct, MatrixProduct, Product
from gangline_planner.judge import recipes


def as_its_software(row: Mapping[str, Any], found: Explained, top_k: int = 0) -> Explained:
    """A layout as the software of a row runs it."""
    if scaled_by_rows(row):
        found = replace(found, products="bf16")
    if overlaps_tensor(row):
        found = _beside(found, {"tp"})
    if recipes.overlaps_experts(row):
        found = _beside(found, {"ep"})
    if recipes.recomputes_experts(row):
        found = _sends_again(found)
    if re.search(r"nemo|mlcommons|megatron-lm readme", said(row)):
        found = _sends(found, "gradients", 0.5)  # grad_reduce_in_fp32=False: in 16 bits
        if found.products != "bf16":
            found = _sends(found, "weights", 0.5)  # fp8_param_gather
    if own_ddp(row):
        found = _behind(found, {"gradients"})
        if found.products == "fp16":
            found = _sends(found, "gradients", 0.5)  # accumulate_allreduce_grads_in_fp32 comes with bf16 alone
    if "nanotron" in said(row) and row.get("zero"):
        found = _behind(_summed_whole(found), {"gradients", "weights"})
    if "nemo" in said(row) and top_k:
        found = _sends_once(found, top_k, recipes.nodes_of_a_token(row))
    changes = [change for change, made in _changes(row, top_k) if made]
    if changes:
        known = {id(work): work for work in found.work}
        made = {key: _after(changes, work) for key, work in known.items()}
        found = replace(found, work=tuple(made[id(work)] for work in found.work))
    return replace(found, kernels=kernels(row))


def scaled_by_rows(row: Mapping[str, Any]) -> bool:
    """Whether each row of a product in 8 bits has a scale of its own. On Hopper such products are no faster than those
    in 16 bits, and their casts come on top (torchtitan's table of 2025-06 has all three).
    """
    return "rowwise" in str(row.get("precision")).lower()


def without_end_blocks(found: Explained) -> Explained:
    """With nothing but the embedding on the first stage, and the head on the last: each counts as a block
    (Megatron-LM, --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split).
    """
    first, block, last = found.work[0], found.work[1], found.work[-1]

    def less(products: Mapping[Product, int], others: Mapping[Product, int]) -> Counter[Product]:
        return Counter(products) - Counter(others)

    def head(work: StageWork) -> StageWork:
        return replace(
            work,
            forward=less(work.forward, block.forward),
            weights=less(work.weights, block.weights),
            again=less(work.again, block.again),
            kept=max(0, work.kept - block.kept),
            kept_again=max(0, work.kept_again - block.kept_again),
            modules=max(1, work.modules - block.modules),
            modules_again=max(0, work.modules_again - block.modules_again),
        )

    return replace(found, work=(head(first), *found.work[1:-1], head(last)))


Change = Callable[[StageWork], StageWork]


def _changes(row: Mapping[str, Any], top_k: int) -> list[tuple[Change, bool]]:
    """What this software computes otherwise than the layout says, each with whether this row has it."""
    vendor, precision = kernels(row) == "vendor", str(row.get("precision")).lower().partition("(")[0]
    scaled = bool(re.search("mx|nvfp4", precision))
    whole = recipes.captures_steps(row)
    return [
        (with_scores, before_2023(row)),
        (recipes.recomputing_latents, recipes.recomputes_latents(row)),
        (recipes.recomputing_experts, recipes.recomputes_experts(row)),
        (recipes.in_eight_bits, recipes.attends_in_eight_bits(row)),
        (recipes.with_head_in_eight_bits, recipes.multiplies_heads_in_eight_bits(row)),
        (lambda work: with_casts(work, 0.5 if "fp4" in precision else 1.0), vendor and scaled),
        (lambda work: with_casts(work, 1.0), scaled_by_rows(row)),
        (lambda work: with_moved_rows(work, 2 if scaled else 3), vendor and top_k > 0 and not whole),
        (with_biases, bool(re.search("gpt.?oss", str(row.get("model")).lower()))),
        (lambda work: replace(work, modules=0, modules_again=0), whole),
    ]


def _after(changes: list[Change], work: StageWork) -> StageWork:
    for change in changes:
        work = change(work)
    return work


def with_casts(work: StageWork, itemsize: float) -> StageWork:
    """With what goes into each product in blocks of a scale of their own (MXFP8, NVFP4), kept twice: blocks of rows for
    the product, blocks of columns for the gradient of its weight (Transformer Engine, `MXFP8Quantizer`).
    """

    def cast(products: Mapping[Product, int]) -> int:
        own = [(p, n) for p, n in products.items() if isinstance(p, MatrixProduct) and p.block]
        least = min((n for _, n in own), default=1)
        inputs = ((p, n // 2 if n == 2 * least else n) for p, n in own)  # keys and values, gate and up read the same
        return int(2 * itemsize * sum(n * p.rows * p.inner for p, n in inputs))

    return replace(work, kept=work.kept + cast(work.forward), kept_again=work.kept_again + cast(work.again))


def with_biases(work: StageWork) -> StageWork:
    """With experts as GPT-OSS has them. The bias of their last product is added behind it, times what the router gives,
    expert by expert and joined again, in 32 bits (Megatron-Core, moe/experts.py, `_apply_bias`): of each number 28
    bytes cross memory forward and 40 backward. What goes into their gate, twice as wide, is clamped and joined before
    (fusions/fused_bias_geglu.py, `weighted_bias_quick_geglu_impl`): 8 and 10. Together as of 17 bytes that are kept.
    """
    own = [(p, n) for p, n in work.forward.items() if isinstance(p, MatrixProduct) and p.matrices > 1]
    behind = sum(n * p.rows * p.columns for p, n in own) // 3  # gate, up and down are of one shape
    return replace(work, kept=work.kept + 17 * behind)


def with_moved_rows(work: StageWork, times: int) -> StageWork:
    """With experts whose rows are sorted by expert before they are sent and behind, and back again, in kernels of their
    own, each row made `times` more, and whose products the host launches one by one (Megatron-Core,
    moe/token_dispatcher.py and `TEGroupedLinear`). In 8 bits they are sorted while they are sent (HybridEP).
    """
    own = [(p, n) for p, n in work.forward.items() if isinstance(p, MatrixProduct) and p.matrices > 1]
    into = [(p, n) for p, n in own if p.inner == max(product.inner for product, _ in own)]
    moved = sum(2 * n * p.rows * p.inner for p, n in into) // 2 if into else 0  # gate and up read the same rows
    launches = sum(n * p.matrices for p, n in own) * 2 // 3  # gate and up are one product
    return replace(work, kept=work.kept + 2 * times * moved, modules=work.modules + launches)


def overlaps_tensor(row: Mapping[str, Any]) -> bool:
    """Whether it sends what tp gathers and sums beside its products: Megatron-LM since 2023 where a row says so, and
    as NVIDIA configures it for NeMo and MLPerf (userbuffers); torchtitan's asynchronous tp.
    """
    if "torchtitan" in said(row):  # whose tables have both ways, and are named after one
        return "asynctp" in str(row.get("technique")).lower().replace(" ", "")
    return bool(re.search(r"tp-comm-overlap|nemo|mlcommons", said(row)))


def own_ddp(row: Mapping[str, Any]) -> bool:
    """Whether gradients are summed behind the last backward pass: by Megatron-LM before 2023, and what is made of it,
    unless a row says torch's DDP (Megatron-LM 2.5, megatron/model/distributed.py, `allreduce_gradients`).
    """
    return before_2023(row) and "torch ddp" not in said(row)


def before_2023(row: Mapping[str, Any]) -> bool:
    """Megatron-LM and what is made of it, of those years (arXiv 1909.08053, 2104.04473, 2205.05198)."""
    words, gpu = said(row), str(row.get("gpu")).lower()
    return bool(re.search("a100|v100", gpu)) and bool(re.search(r"megatron|2205\.05198|vtrain", words))


def kernels(row: Mapping[str, Any]) -> Kernels:
    """NVIDIA's libraries have kernels for norms, gates, rotations and attention; torchtitan compiles (the table of
    2024-12 says where); nanotron runs operator by operator.
    """
    words = said(row)
    if "nanotron" in words:
        return "apart"
    if "torchtitan" in words:
        return "fused" if "float8" in words or "compile" in words or "asynctp" in words else "apart"
    return "fused" if "llama 3 herd" in words else "vendor"


def with_scores(work: StageWork) -> StageWork:
    """Attention as products of matrices, nothing of them passed over, whose scores cross memory: what goes into the
    softmax, what comes out, the dropout's mask and what it leaves (arXiv 2205.05198, section 4.1: 5 a s^2 b bytes).
    """

    def apart(products: Mapping[Product, int]) -> tuple[Counter[Product], int]:
        made, kept = Counter[Product](), 0
        for product, times in products.items():
            if not isinstance(product, AttentionProduct):
                made[product] += times
                continue
            pairs = product.sequences * product.heads
            rows, keys, width = pairs * product.queries, product.keys, product.head_dim
            for inner, columns in ((width, keys), (keys, width)):
                made[MatrixProduct(rows=rows, inner=inner, columns=columns, matrices=pairs, block=False)] += times
            kept += 5 * pairs * product.queries * product.keys * times
        return made, kept

    (forward, kept), (again, kept_again) = apart(work.forward), apart(work.again)
    scores = Counter({product: n for product, n in forward.items() if product not in work.forward})
    return replace(
        work,
        forward=forward,
        again=again,
        weights=Counter(work.weights) + scores,  # each has two gradients, as a product with a weight has
        kept=work.kept + kept,
        kept_again=work.kept_again + kept_again,
    )


def said(row: Mapping[str, Any]) -> str:
    return f"{row.get('source')} {row.get('notes')} {row.get('technique')} {row.get('table')}".lower()


def _sends(found: Explained, purpose: str, share: float) -> Explained:
    """With transfers over data axes of this purpose as many times as large."""

    def of(sent: Transfer) -> Transfer:
        ours = sent.purpose == purpose and sent.axes != ("tp",)
        return replace(sent, bytes=int(share * sent.bytes)) if ours else sent

    return _changed(found, of)


def _behind(found: Explained, purposes: set[str]) -> Explained:
    """With transfers over data axes of these purposes that nothing hides."""

    def of(sent: Transfer) -> Transfer:
        return replace(sent, waits=True) if sent.purpose in purposes and sent.when in ("end", "update") else sent

    return _changed(found, of)


def _summed_whole(found: Explained) -> Explained:
    """With gradients that all ranks get the sum of, though each needs a part (nanotron's trainer.py, `training_step`:
    reduce_scatter=False).
    """

    def of(sent: Transfer) -> Transfer:
        whole = sent.operation == "reduce_scatter" and sent.purpose == "gradients"
        return replace(sent, operation="all_reduce", bytes=2 * sent.bytes) if whole else sent

    return _changed(found, of)


def _sends_once(found: Explained, top_k: int, nodes: int | None) -> Explained:
    """With rows that go once to each rank, or beyond the node to each node, that has any of their experts (DeepEP,
    HybridEP): of `top_k` draws among n places that many are different, and beyond the node not more than `nodes`.
    """

    def of(sent: Transfer) -> Transfer:
        if sent.axes != ("ep",):
            return sent
        places = sent.ranks if sent.tier == "node" else max(2, sent.ranks // max(1, sent.each_node))
        different = places * (1 - (1 - 1 / places) ** top_k)
        if sent.tier != "node" and nodes is not None:
            different = min(different, nodes)
        return replace(sent, bytes=int(sent.bytes * different / top_k))

    return _changed(found, of)


def _sends_again(found: Explained) -> Explained:
    """With what experts are sent forward sent again while they are computed again."""

    def all_of(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        more = (replace(sent, when="B") for sent in transfers if sent.axes == ("ep",) and sent.when == "F")
        return (*transfers, *more)

    return replace(found, ranks=tuple(replace(rank, transfers=all_of(rank.transfers)) for rank in found.ranks))


def _changed(found: Explained, of: Callable[[Transfer], Transfer]) -> Explained:
    return replace(found, ranks=tuple(replace(rank, transfers=tuple(map(of, rank.transfers))) for rank in found.ranks))


def _beside(found: Explained, axes: set[str]) -> Explained:
    return _changed(found, lambda sent: replace(sent, waits=False) if set(sent.axes) <= axes else sent)
