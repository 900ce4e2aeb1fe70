"""Settings of Megatron-Bridge's recipes that published rows do not name.

After NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs (until 2026-07) and src/megatron/bridge/perf_recipes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from published.row import Row


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a model on a machine in a container; all unset for other software.

    captured            a step with experts is one CUDA graph, the products of experts are one kernel with gate and
                        casts, and their rows travel next to other products
    fp8_attention       attention multiplies in 8 bits, too
    fp8_head            the products of the head are in 8 bits, too
    chunks              model chunks of a pipeline rank where a row leaves them out
    mtp                 a module for a second token ahead is trained along (the rows' 260e9 operations of a token
                        include it)
    full_first          each stage has as many blocks as the first, and the last one the rest
    latents_again       the backward pass computes heads from their latents again
    experts_again       the backward pass computes layers of experts again, with what they send, and attention
    experts_overlap     rows travel to experts next to the products of other rows
    nodes               nodes that have experts of a token at most: DeepSeek-V3 takes four of eight groups (n_group and
                        topk_group in its config.json), and each of eight nodes holds a group
    """

    captured: bool = False
    fp8_attention: bool = False
    fp8_head: bool = False
    chunks: int | None = None
    mtp: bool = False
    full_first: bool = False
    latents_again: bool = False
    experts_again: bool = False
    experts_overlap: bool = False
    nodes: int | None = None

    @classmethod
    def of(cls, row: Row) -> Recipe:
        at, v3 = _container(row), row.is_model("deepseekv3")
        nodes = 4 if v3 and row.get("ep") == 64 and row.runs_on("h100|h800|b[23]00") else None
        if at is None:
            return cls(nodes=nodes)
        deepseek, kimi, gpt_oss = map(row.is_model, ("deepseek", "kimi", "gpt.?oss"))
        gb200, gb300, h100 = map(row.runs_on, ("gb200", "gb300", "h100"))
        captured = (
            at >= (26, 6) and row.matches("precision", "mx") and (deepseek or kimi or gpt_oss or row.is_model("qwen3"))
        )
        fits = gb300 and row.get("micro_batch") == 1  # 288 GB hold the heads of one sequence
        dense_again = gb200 and at < (26, 6)  # these compute their three dense layers again
        return cls(
            captured=captured,
            fp8_attention=captured and not (deepseek and gb200),
            fp8_head=captured and (deepseek or gpt_oss),
            chunks=5 if row.is_model("llama3_70b") else None,
            mtp=v3,
            full_first=v3 or kimi,
            latents_again=kimi or (deepseek and not fits and not dense_again),
            experts_again=row.is_model("nemotron_3_nano") and h100,
            experts_overlap=captured or (at < (26, 1) and deepseek and h100),
            nodes=nodes,
        )


def _container(row: Row) -> tuple[int, int] | None:
    """Return year and month of the NeMo container that a source names."""
    found = re.search(r"(\d\d)\.(\d\d)(\.\d+)? nemo container", row.text("source"))
    return (int(found[1]), int(found[2])) if found else None
