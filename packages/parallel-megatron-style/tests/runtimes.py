"""Strategies of this package on the ranks of a pool, built as `train` builds them."""

from __future__ import annotations

from typing import Any

from torch import nn

from gangline.comm.base import Comms
from gangline.config.schema import Run
from gangline.mesh import Mesh
from gangline.model.compose import Composed
from gangline.model.init import initialise
from gangline.plugin import registry
from gangline.precision import Precision
from gangline.runtime import Job
from gangline.train.recompute_and_compile import make_finish
from gangline_testkit import rank


def runtime_of(
    run: Run, *, model: nn.Module | None = None, comms: Comms | None = None, precision: Precision | None = None
) -> Any:
    """Build the strategy of the run on all ranks of this pool, and initialize its weights.

    Arguments replace the parts of the run: `model` is a model with its own weights, which are kept; `comms` are the
    communicators, for example ones that count bytes; `precision` is the precision.
    """
    composed, mesh = Composed.of(run), Mesh.of(run.parallel.size_axes(rank.world))
    job = Job(
        composed,
        mesh,
        comms or rank.make_comms(mesh, run.deterministic),
        precision or registry.build(run.precision, run),
        make_finish(run.job.recompute, run.job.compile, run.job.recompute_every, composed.plan.seams),
    )
    if model is not None:
        job.model = model
    runtime = registry.build(run.parallel, job)
    if model is None:
        initialise(runtime.shards(), composed.plan, run.seed)
    return runtime
