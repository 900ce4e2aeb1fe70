"""Model the software of a published row: the transfers that it hides, the kernels that it fuses, its recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gangline.explain.explained import Explained, Kernels
from gangline.explain.work import StageWork
from published import transfers, work as works
from published.recipes import Recipe
from published.row import Row

Edit = Callable[[StageWork], StageWork]


def as_its_software(row: Row, recipe: Recipe, found: Explained, top_k: int) -> Explained:
    """Return a layout as the software of a row runs it."""
    if scales_rows(row):
        found = replace(found, matmul_format="bf16")
    if overlaps_tensor(row):
        found = transfers.overlap(found, "tp")
    if recipe.experts_overlap:
        found = transfers.overlap(found, "ep")
    if recipe.experts_again:
        found = transfers.send_rows_again(found)
    if row.cites("nemo|mlcommons|megatron-lm readme"):
        found = transfers.halve(found, "gradients")  # grad_reduce_in_fp32=False: 16-bit reduction
        if found.matmul_format != "bf16":
            found = transfers.halve(found, "weights")  # fp8_param_gather: 8-bit gather
    if before_2023(row) and not row.cites("torch ddp"):
        # Megatron-LM 2.5 reduces after the last backward pass: megatron/model/distributed.py, `allreduce_gradients`
        found = transfers.expose(found, "gradients")
        if found.matmul_format == "fp16":
            found = transfers.halve(found, "gradients")  # only bf16 needs accumulate_allreduce_grads_in_fp32
    if row.cites("nanotron") and row.get("zero"):
        found = transfers.expose(transfers.all_reduce_gradients(found), "gradients", "weights")
    if row.cites("nemo") and top_k:
        found = transfers.send_rows_once(found, top_k, recipe.nodes)
    edits, unique = _edits(row, recipe, top_k), {id(work): work for work in found.work}
    # equal stages stay one object, so that their time is computed once
    made = {key: _edit(work, edits) for key, work in unique.items()}
    return replace(found, work=tuple(made[id(work)] for work in found.work), kernels=kernels(row))


def _edit(work: StageWork, edits: list[Edit]) -> StageWork:
    for edit in edits:
        work = edit(work)
    return work


def _edits(row: Row, recipe: Recipe, top_k: int) -> list[Edit]:
    """Return the edits for computation of this software that the layout does not describe."""
    vendor, precision = kernels(row) == "vendor", row.text("precision").partition("(")[0]
    scaled = "mx" in precision or "nvfp4" in precision
    edits: list[tuple[bool, Edit]] = [
        (before_2023(row), works.with_scores),
        (recipe.latents_again, works.recompute_latents),
        (recipe.experts_again, works.recompute_experts),
        (recipe.fp8_attention, works.with_fp8_attention),
        (recipe.fp8_head, works.with_fp8_head),
        (vendor and scaled, lambda work: works.with_casts(work, 0.5 if "fp4" in precision else 1.0)),
        (scales_rows(row), lambda work: works.with_casts(work, 1.0)),
        (
            vendor and top_k > 0 and not recipe.captured,
            lambda work: works.with_moved_rows(work, 2 if scaled else 3),
        ),
        (row.is_model("gpt.?oss"), works.with_biases),
        (recipe.captured, lambda work: replace(work, modules=0, recomputed_modules=0)),
    ]
    return [edit for made, edit in edits if made]


def scales_rows(row: Row) -> bool:
    """Return whether each row of an 8-bit matmul has a separate scale.

    On Hopper such matmuls are no faster than 16-bit matmuls, and their casts take additional time (torchtitan's table
    of 2025-06 has all three).
    """
    return row.matches("precision", "rowwise")


def overlaps_tensor(row: Row) -> bool:
    """Return whether matmuls hide the transfers along tp.

    They do in Megatron-LM since 2023 if the row says so, in NeMo and MLPerf with NVIDIA's configurations (userbuffers),
    and with torchtitan's asynchronous tp.
    """
    if row.cites("torchtitan"):  # its tables have rows with and without it, and are named after one
        return "asynctp" in row.text("technique").replace(" ", "")
    return row.cites("tp-comm-overlap|nemo|mlcommons")


def before_2023(row: Row) -> bool:
    """Return whether the run used Megatron-LM or a successor before 2023 (arXiv 1909.08053, 2104.04473, 2205.05198)."""
    return row.matches("gpu", "a100|v100") and row.cites(r"megatron|2205\.05198|vtrain")


def kernels(row: Row) -> Kernels:
    """Return which kernels are fused.

    NVIDIA's libraries have fused kernels for norms, gates, rotary embeddings and attention. torchtitan compiles (the
    table of 2024-12 says where). nanotron runs each operator separately.
    """
    if row.cites("nanotron"):
        return "apart"
    if row.cites("torchtitan"):
        return "fused" if row.cites("float8|compile|asynctp") else "apart"
    return "fused" if row.cites("llama 3 herd") else "vendor"
