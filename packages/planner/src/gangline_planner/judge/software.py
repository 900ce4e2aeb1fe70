"""What the software of a published row does beside a layout: what it overlaps, which kernels it fuses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gangline.explain import AttentionProduct, Explained, Kernels, MatrixProduct, Product, StageWork, Transfer


def as_its_software(row: Mapping[str, Any], found: Explained, top_k: int = 0) -> Explained:
    """A layout as the software of a row runs it."""
    if overlaps_tensor(row):
        found = _beside(found, {"tp"})
    if overlaps_experts(row):
        found = _beside(found, {"ep"})
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
        found = _sends_once(found, top_k)
    if before_2023(row):
        found = replace(found, work=tuple(map(with_scores, found.work)))
    return replace(found, kernels=kernels(row))


def overlaps_tensor(row: Mapping[str, Any]) -> bool:
    """Whether it sends what tp gathers and sums beside its products: Megatron-LM since 2023 where a row says so, and
    as NVIDIA configures it for NeMo and MLPerf (userbuffers); torchtitan's asynchronous tp.
    """
    return bool(re.search(r"tp-comm-overlap|nemo|mlcommons|async ?tp", said(row)))


def overlaps_experts(row: Mapping[str, Any]) -> bool:
    """Whether rows travel to experts beside the products of others: Megatron-Bridge from container 26.06 on."""
    container = re.search(r"(\d\d)\.(\d\d)(\.\d+)? nemo container", said(row))
    return container is not None and (int(container[1]), int(container[2])) >= (26, 6)


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


def _sends_once(found: Explained, top_k: int) -> Explained:
    """With rows that go once to each rank, or beyond the node to each node, that has any of their experts (DeepEP,
    HybridEP): of `top_k` draws among n places that many are different.
    """

    def of(sent: Transfer) -> Transfer:
        if sent.axes != ("ep",):
            return sent
        places = sent.ranks if sent.tier == "node" else max(2, sent.ranks // max(1, sent.each_node))
        return replace(sent, bytes=int(sent.bytes * places * (1 - (1 - 1 / places) ** top_k) / top_k))

    return _changed(found, of)


def _changed(found: Explained, of: Callable[[Transfer], Transfer]) -> Explained:
    return replace(found, ranks=tuple(replace(rank, transfers=tuple(map(of, rank.transfers))) for rank in found.ranks))


def _beside(found: Explained, axes: set[str]) -> Explained:
    return _changed(found, lambda sent: replace(sent, waits=False) if set(sent.axes) <= axes else sent)
