"""Functions that a rank runs for tests of health checks: attach a check, call it as core does, or train a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gangline.comm import transport
from gangline.comm.base import Comm, Comms
from gangline.config.schema import HealthConfig, Run
from gangline.health import HealthCheck, Verdict
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.optimizer import Optimizer
from gangline.plugin.registry import build, load
from gangline.record import StepRecord
from gangline.run.attempts import Attempt
from gangline.runtime import Runtime
from gangline.train.rank import train
from gangline_basics.precision.plain import Plain
from gangline_testkit import rank
from gangline_testkit.runs import build_small_run
from gangline_testkit.sessions import open_session
from gangline_testkit.strategy_ranks import StrategyJob, start_rows


class Outside(AssertionError):
    """Error of a collective in a call that must not run collectives."""


@contextmanager
def forbid_collectives() -> Iterator[None]:
    """Forbid collectives in the block: calls of a Comm with several ranks or of torch.distributed raise `Outside`."""
    names = ("all_reduce", "all_gather_into_tensor", "all_gather_object", "all_to_all_single", "barrier", "broadcast")
    places: list[tuple[Any, str]] = [(dist, name) for name in (*names, "broadcast_object_list", "batch_isend_irecv")]
    places += [(dist, "send"), (dist, "recv"), (transport, "_all_gather"), (transport, "_reduce_scatter")]
    originals = [(module, name, getattr(module, name)) for module, name in places]

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise Outside("a collective runs in a method that must not run collectives")

    for module, name in places:
        setattr(module, name, refuse)
    try:
        yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)


@cache
def build_small_runtime() -> tuple[Runtime, Optimizer, Comms]:
    """Return (runtime, optimizer, comms) of a small model on the toy strategy `rows`, on all ranks of the pool."""
    run, mesh = build_small_run(), Mesh.of({"dp_shard": rank.world})
    job = StrategyJob("", run, *compose_model(run), mesh, torch.float32, "ragged")
    runtime = start_rows(job, Plain(job.dtype, job.dtype))
    return runtime, build(run.optimizer, run, runtime), rank.make_comms(mesh, True)


def attach_check(check: HealthCheck, name: str) -> HealthCheck:
    """Attach a check as before the first step of a run, and return the check."""
    runtime, optimizer, comms = build_small_runtime()
    check.place = f"health/{name}"
    check.attach(runtime, optimizer, comms, comms.store, comms.device)
    return check


def ask_check(check: HealthCheck, record: StepRecord, comm: Comm) -> list[Verdict]:
    """Call a check for one step as core does, and return its verdicts."""
    check.before_step(record.step)
    verdicts: list[Verdict] = []
    if record.finite:
        with forbid_collectives():
            verdicts += check.before_update(record.loss, record.grad_norm)
    check.after_step(record, record.finite)
    if record.step % check.every == 0:
        check.collective(comm)
        with forbid_collectives():
            verdicts += check.observe(record)
    return verdicts


def observe_records(
    build: str, name: str, config: HealthConfig, run: Run, records: list[StepRecord]
) -> tuple[list[dict], dict]:
    """Call this rank's check for these records as core does, and return (verdicts, final state)."""
    check = attach_check(load(build)(config, run), name)
    verdicts = [verdict.to_dict() for verdict in check.before_run()]
    *_, comms = build_small_runtime()
    for record in records:
        verdicts += [verdict.to_dict() for verdict in ask_check(check, record, comms.world)]
    with forbid_collectives():
        return verdicts, check.state()


def run_training(run_dir: Path, *settings: str) -> tuple[list[str], list[Attempt]]:
    """Train on this rank, and return (notes of the reporter, lines of attempts.jsonl)."""
    s = open_session(run_dir, *settings)
    notes, note = [], s.reporter.note
    s.reporter.note = lambda text: notes.append(text) or note(text)  # type: ignore[method-assign, func-returns-value]
    train(s)
    return notes, s.history
