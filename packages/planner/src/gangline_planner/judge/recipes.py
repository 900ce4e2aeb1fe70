"""What Megatron-Bridge's recipes of a row's model, machine and container switch on that the row does not say.

After NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs (until 2026-07) and src/megatron/bridge/perf_recipes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gangline.explain.work import StageWork
from gangline.model.products import AttentionProduct, MatrixProduct, Product

LATENT = {1536, 512}  # widths of the queries' and of the keys' and values' latents of DeepSeek-V3


def container(row: Mapping[str, Any]) -> tuple[int, int] | None:
    """Year and month of the NeMo container that a row's source names; None for other software."""
    found = re.search(r"(\d\d)\.(\d\d)(\.\d+)? nemo container", str(row.get("source")).lower())
    return (int(found[1]), int(found[2])) if found else None


def of_experts(row: Mapping[str, Any]) -> bool:
    return bool(re.search("deepseek|qwen3|gpt.?oss|nemotron|kimi", str(row.get("model")).lower()))


def captures_steps(row: Mapping[str, Any]) -> bool:
    """Whether a whole step with experts is one CUDA graph, their products one kernel with gate and casts, and their
    rows travel beside other products: from 26.06 on in MXFP8, but for hybrids with Mamba.
    """
    at = container(row)
    known = at is not None and at >= (26, 6) and of_experts(row) and "nemotron" not in str(row.get("model")).lower()
    return known and "mx" in str(row.get("precision")).lower()


def attends_in_eight_bits(row: Mapping[str, Any]) -> bool:
    """Whether attention multiplies in 8 bits, too: where steps are captured, but for DeepSeek-V3 on GB200."""
    deepseek = "deepseek" in str(row.get("model")).lower()
    return captures_steps(row) and not (deepseek and _on(row, "gb200"))


def multiplies_heads_in_eight_bits(row: Mapping[str, Any]) -> bool:
    """Whether the head's products are in 8 bits, too: where steps are captured, of DeepSeek-V3 and GPT-OSS."""
    return captures_steps(row) and bool(re.search("deepseek|gpt.?oss", str(row.get("model")).lower()))


def chunks(row: Mapping[str, Any]) -> int | None:
    """Model chunks of a pipeline rank that a row leaves out: Llama 3 70B has five of them on every machine."""
    named = "llama3_70b" in str(row.get("model")).lower()
    return 5 if container(row) is not None and named else None


def predicts_further(row: Mapping[str, Any]) -> bool:
    """Whether a module for a second token ahead is trained along: DeepSeek-V3's (the rows' operations of a token are
    those with it: 260e9).
    """
    return container(row) is not None and "deepseekv3" in str(row.get("model")).lower().replace("-", "")


def fills_stages_in_turn(row: Mapping[str, Any]) -> bool:
    """Whether each stage has as many blocks as the first, and the last what is left: DeepSeek-V3 and Kimi K2."""
    return predicts_further(row) or (container(row) is not None and "kimi" in str(row.get("model")).lower())


def recomputes_latents(row: Mapping[str, Any]) -> bool:
    """Whether what heads get of latents is computed again: Kimi K2; DeepSeek-V3 but where 288 GB hold one sequence, and
    on GB200 before 26.06, which computes its three dense layers again instead.
    """
    at, one = container(row), row.get("micro_batch") == 1
    if at is not None and "kimi" in str(row.get("model")).lower():
        return True
    if at is None or "deepseek" not in str(row.get("model")).lower():
        return False
    return not (_on(row, "gb300") and one) and not (_on(row, "gb200") and at < (26, 6))


def with_second_head(work: StageWork) -> StageWork:
    """The last stage with the head once more, behind a product of the hidden state with the next token's embedding."""
    more: Counter[Product] = Counter()
    for product in work.forward:
        if isinstance(product, MatrixProduct) and not product.block:
            more[product] += 1
            more[replace(product, inner=2 * product.inner, columns=product.inner, block=True)] += 1
    return replace(work, forward=Counter(work.forward) + more, weights=Counter(work.weights) + more)


def recomputes_experts(row: Mapping[str, Any]) -> bool:
    """Whether layers of experts are computed again as a whole, what they send included, and attention: Nemotron 3 Nano
    in 80 GB.
    """
    return container(row) is not None and "nemotron_3_nano" in str(row.get("model")).lower() and _on(row, "h100")


def recomputing_experts(work: StageWork) -> StageWork:
    """Experts, and those that all rows share, which are the products behind as wide as they are."""
    own = {p.columns for p in work.forward if isinstance(p, MatrixProduct) and p.matrices > 1}
    shared = {2 * min(own)} if own else set[int]()
    again: Counter[Product] = Counter(work.again)
    for product, n in work.forward.items():
        alike = isinstance(product, MatrixProduct) and (
            product.matrices > 1 or {product.inner, product.columns} & shared
        )
        if alike or isinstance(product, AttentionProduct):
            again[product] += n
    return replace(work, again=again)


def overlaps_experts(row: Mapping[str, Any]) -> bool:
    """Whether rows travel to experts beside the products of others: in captured steps, and DeepSeek-V3's on H100 until
    the containers of 2026.
    """
    at, deepseek = container(row), "deepseek" in str(row.get("model")).lower()
    return captures_steps(row) or (at is not None and at < (26, 1) and deepseek and _on(row, "h100"))


def nodes_of_a_token(row: Mapping[str, Any]) -> int | None:
    """Nodes that have experts of a token at most: four of DeepSeek-V3's eight groups (n_group and topk_group in its
    config.json), where each of eight nodes holds a group. None where nothing limits them.
    """
    deepseek = "deepseekv3" in str(row.get("model")).lower().replace("-", "")
    return 4 if deepseek and row.get("ep") == 64 and _on(row, "h100|h800|b[23]00") else None


def recomputing_latents(work: StageWork) -> StageWork:
    again: Counter[Product] = Counter(work.again)
    for product, n in work.forward.items():
        if isinstance(product, MatrixProduct) and product.inner in LATENT and product.matrices == 1:
            again[product] += n
    return replace(work, again=again)


def with_head_in_eight_bits(work: StageWork) -> StageWork:
    """With products of the head in the format of blocks' products. What routes rows to experts stays as it is."""

    def narrow(products: Mapping[Product, int]) -> Counter[Product]:
        found: Counter[Product] = Counter()
        for product, n in products.items():
            if isinstance(product, MatrixProduct) and not product.block and product.columns > product.inner:
                product = replace(product, block=True)
            found[product] += n
        return found

    return replace(work, forward=narrow(work.forward), weights=narrow(work.weights), again=narrow(work.again))


def in_eight_bits(work: StageWork) -> StageWork:
    """With products of attention that take half as long, and exponentials as long as before: of heads half as wide."""

    def narrow(products: Mapping[Product, int]) -> Counter[Product]:
        found: Counter[Product] = Counter()
        for product, n in products.items():
            if isinstance(product, AttentionProduct):
                product = replace(product, head_dim=product.head_dim // 2)
            found[product] += n
        return found

    return replace(work, forward=narrow(work.forward), again=narrow(work.again))


def _on(row: Mapping[str, Any], gpu: str) -> bool:
    """Whether a row's accelerator matches; `b200` is not in `gb200`'s rows."""
    return re.search(rf"(?<!g)({gpu})", str(row.get("gpu")).lower()) is not None
