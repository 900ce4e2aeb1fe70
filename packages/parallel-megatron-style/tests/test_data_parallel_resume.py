"""Error feedback of `gradients=onebit` on resume: restored in the same layout, reset with a notice in another."""

from __future__ import annotations

from dataclasses import replace

import torch

from gangline.checkpoint.base import SaveRequest
from gangline.config.schema import Run
from gangline.mesh import Mesh
from gangline.run.directory import RunDirectory
from gangline.train.build import build
from gangline.train.loop import step
from gangline.train.report import Clock
from gangline.train.save import save, settle
from gangline.train.session import Session
from gangline_testkit import rank
from gangline_testkit.pool import get_pool
from gangline_testkit.runs import build_small_run


def session_of(run: Run, path: str) -> Session:
    mesh = Mesh.of(run.parallel.size_axes(rank.world))
    return build(run, RunDirectory(path), mesh, rank.make_comms(mesh), torch.device("cpu"))


def state(session: Session, prefix: str) -> dict[str, torch.Tensor]:
    return {shard.name: shard.local.clone() for shard in session.shards() if shard.name.startswith(prefix)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saved_and_resumed(run: Run, path: str) -> tuple[list[bool], list[str], bool, list[str]]:
    """Save after two steps and resume, in the same layout and in another layout.

    Return (whether the error feedback is nonzero, is restored, and leads to the same next step; notes of the resumed
    session; whether it is zero in the other layout; notes of that session).
    """
    first = session_of(run, path)
    for _ in range(2):
        step(first, Clock())
    errors = state(first, "local/")
    save(first, SaveRequest(first.step))
    settle(first, every_tier=True)
    again = session_of(run, path)
    found = [all(bool(x.any()) for x in errors.values()), same(errors, state(again, "local/"))]
    step(first, Clock())
    step(again, Clock())
    found += [same(state(first, prefix), state(again, prefix)) for prefix in ("model/", "optimizer/", "local/")]
    axes = replace(run.parallel, dp_replicate=rank.world, dp_shard=1)
    other = session_of(replace(run, parallel=axes), path)
    return found, again.notes, not any(bool(x.any()) for x in state(other, "local/").values()), other.notes


def test_error_feedback_resumes_only_in_same_layout(tmp_path):
    path = str(tmp_path / "run")
    settings = ("parallel=fsdp", "parallel.zero=1", "gradients=onebit", "gradients.start_step=0")
    run = build_small_run(
        *settings, "parallel.dp_shard=2", "model.vocab_size=256", "checkpoint=torch", f"run.dir={path}"
    )
    RunDirectory.create(run)
    for found, notes, zero, other_notes in get_pool(2).run(saved_and_resumed, run, path):
        assert found == [True] * 5
        assert notes == []
        assert zero
        assert len(other_notes) == 1
        assert "local/" in other_notes[0]
        assert "start from zero" in other_notes[0]
