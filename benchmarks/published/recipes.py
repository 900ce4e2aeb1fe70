"""Provide settings of Megatron-Bridge's recipes that published rows do not name.

Sources: NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs (until 2026-07) and src/megatron/bridge/perf_recipes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from published.row import Row


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a model on a machine in a container; all unset for other software.

    captured            a step with experts is one CUDA graph; the expert matmuls are one kernel with gate and casts;
                        dispatch of tokens overlaps with other matmuls
    fp8_attention       matmuls of attention are in 8 bits too
    fp8_head            matmuls of the head are in 8 bits too
    chunks              number of model chunks per pipeline rank, if the row has none
    mtp                 one multi-token prediction module is trained too (the rows' 260e9 FLOPs per token include it)
    full_first          all stages have as many blocks as the first; the last has the remaining blocks
    latents_again       the backward pass recomputes heads from their latents
    experts_again       the backward pass recomputes expert layers, with their dispatch, and attention
    experts_overlap     dispatch of tokens overlaps with matmuls of other tokens
    nodes               maximum number of nodes with experts of one token: DeepSeek-V3 selects four of eight groups
                        (n_group and topk_group in its config.json), and each of eight nodes holds one group
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
        fits = gb300 and row.get("micro_batch") == 1  # 288 GB are enough for the heads of one sequence
        dense_again = gb200 and at < (26, 6)  # in these containers the three dense layers are recomputed
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
    """Return (year, month) of the NeMo container that a source names; None if it names none."""
    found = re.search(r"(\d\d)\.(\d\d)(\.\d+)? nemo container", row.text("source"))
    return (int(found[1]), int(found[2])) if found else None
