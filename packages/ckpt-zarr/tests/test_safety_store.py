"""Several checkpointers in sequence on one job store: keys of earlier saves and loads have no effect."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from made import composed

from gangline.checkpoint.id import CheckpointId
from gangline.mesh import Mesh
from gangline_ckpt_zarr.tiers import places
from gangline_testkit import checkpointer_ranks as kit
from gangline_testkit.pool import get_pool

MESH = Mesh.of({"dp_shard": 2})


def one_after_another(job: kit.CheckpointerJob, steps: tuple[int, ...]) -> list[list[str]]:
    """Save and load each step with new checkpointers under the same keys, as restarted workers do."""
    found = []
    registry = kit.build_registry(job.mesh)
    for step in steps:
        checkpointer = kit.open_checkpointer(job)
        kit.save_with(checkpointer, job, step, step)
        checkpointer.close()
        checkpointer = kit.open_checkpointer(job)
        shards = kit.make_shards(registry, None)
        checkpointer.load(CheckpointId(step), shards, registry)
        checkpointer.close()
        found.append(kit.find_wrong(shards, step))
    return found


@pytest.mark.parametrize("words", [(), ("checkpoint.memory_every=1",)], ids=["disk", "memory"])
def test_successive_checkpointers_share_one_job_store(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = composed(tmp_path, *words)
    job = kit.CheckpointerJob("gangline_ckpt_zarr.checkpointer:build", run, MESH, str(tmp_path))
    try:
        assert get_pool(2).run(one_after_another, job, (1, 2, 3)) == [[[], [], []]] * 2
    finally:
        shutil.rmtree(places.locate_node(tmp_path), ignore_errors=True)
