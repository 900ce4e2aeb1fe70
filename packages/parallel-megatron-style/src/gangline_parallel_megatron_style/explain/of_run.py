"""The `Case` of a run for `gangline parallel explain`, or the problems of the run. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline import UserError
from gangline.explain.explained import Explained
from gangline.mesh import Mesh
from gangline_parallel_megatron_style.config import AxesConfig
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.explain.explained import explain_case
from gangline_parallel_megatron_style.layout import check

if TYPE_CHECKING:
    from gangline.config import Run


def explain_run(run: Run) -> Explained:
    """Return traffic, memory and work of a run. Raises UserError if the layout does not fit; needs no GPUs."""
    return explain_case(make_case(run), run.job.device != "cpu", run.precision.get_matmul_format())


def make_case(run: Run) -> Case:
    """Return a run on its mesh as a case.

    Raises UserError if the layout does not fit, or if the strategy is of another package.
    """
    from gangline.config.check import count_ranks, find_layout_problems, find_meaningless
    from gangline.plugin.registry import installed

    if not isinstance(run.parallel, AxesConfig):
        part = installed().find_part(run.parallel).part.name
        choices = ", ".join(
            name for name, offer in installed().get_offers("parallel").items() if _is_composed(offer.part.config)
        )
        raise UserError(
            f"parallel={part} is a strategy of another package.",
            f"gangline parallel supports: {choices}.",
            f"`gangline plan parallel={part} cluster=NAME` reports traffic and memory of any strategy.",
        )
    if problems := find_meaningless(run):
        raise UserError.of(problems)
    nested_parts = [
        getattr(edit, name) for edit in run.edits.values() for name in installed().find_part(edit).part.opens
    ]
    problems = [problem for part in (run.model, *run.edits.values(), *nested_parts) for problem in part.check(run)]
    problems += check.check(run.parallel, run) or find_layout_problems(run)
    if problems:
        raise UserError.of(problems)
    return Case.of(run, Mesh.of(run.parallel.size_axes(count_ranks(run))))


def _is_composed(config: type) -> bool:
    return issubclass(config, AxesConfig)
