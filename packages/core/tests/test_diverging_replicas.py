"""Replicas that differ between synchronizations: checkpoints hold the first replica; refused combinations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gangline.checkpoint.id import CheckpointId
from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline.shard import Division, Layout, Places, Registry
from gangline.train.build import check_replicas
from gangline.train.rank import train
from gangline_testkit import as_installed
from gangline_testkit.pool import get_pool
from gangline_testkit.sessions import open_session

WORDS = ("parallel=apart", "parallel.every=4", "checkpoint=torch", "checkpoint.every=2", "batch.global_size=4")


@pytest.fixture(autouse=True, scope="module")
def toys():
    with as_installed("gangline-toys", "gangline_testkit.toys.plugin"):
        yield


def lived(run_dir: Path, *words: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Train, and return the exit code and this rank's weights at the end."""
    with as_installed("gangline-toys", "gangline_testkit.toys.plugin"):
        s = open_session(run_dir, *words)
        code = train(s)
        return code, {shard.name: shard.local.detach().clone() for shard in s.runtime.shards()}


def stored(run_dir: Path, id: CheckpointId) -> dict[str, torch.Tensor]:
    """Return this rank's weights in the newest checkpoint, which must be `id`."""
    with as_installed("gangline-toys", "gangline_testkit.toys.plugin"):
        s = open_session(run_dir, *WORDS)
        assert s.saved == str(id)
        return {shard.name: shard.local.detach().clone() for shard in s.runtime.shards()}


def test_first_replica_writes_diverging_arrays():
    """Use three replicas of two shards, each on two tp ranks: only tp ranks of the first replica share the writes."""
    mesh = Mesh.of({"dp_replicate": 3, "dp_shard": 2, "tp": 2})
    cut = Layout((8, 4), divisions=(Division(("dp_shard",), ((0, 4, 8),)),))
    layouts = {f"model/{number}": cut for number in range(4)}
    registry = Registry.of(mesh, layouts, {"dp_replicate"})
    writers = set()
    for name in registry:
        for box, holders in registry.iterate_held(name):
            assert len(holders) == 6
            assert mesh.coordinate(holders[0])["dp_replicate"] == 0
            assert (box, True) in registry.list_rank_boxes(name, holders[0])
            writers.add(holders[0])
        assert Places(mesh, registry[name]).writers == 2
    assert len(writers) == 4
    assert {layout.differs for layout in registry.add_like("optimizer/m", registry).layouts.values()} == {
        ("dp_replicate",)
    }


def test_a_checkpoint_holds_the_first_replica(tmp_path):
    """Save at step 2, between two synchronizations; every replica resumes with the weights of the first replica."""
    ranks = get_pool(2).run(lived, tmp_path / "run", *WORDS, "run.steps=2")
    assert [code for code, _ in ranks] == [0, 0]
    first, second = (weights for _, weights in ranks)
    assert any(not torch.equal(first[name], second[name]) for name in first), "the replicas do not differ"
    for weights in get_pool(2).run(stored, tmp_path / "run", CheckpointId(2, 1)):
        for name, weight in weights.items():
            assert torch.equal(weight, first[name]), name


def test_replicas_are_equal_after_synchronization(tmp_path):
    (_, first), (_, second) = get_pool(2).run(lived, tmp_path / "run", *WORDS, "run.steps=4")
    assert all(torch.equal(first[name], second[name]) for name in first)


def mixes(run_dir: Path) -> str:
    """Return the error for an optimizer that registers an array of its own as equal on all replicas."""
    with as_installed("gangline-toys", "gangline_testkit.toys.plugin"):
        s = open_session(run_dir, *WORDS)
        own = Registry.of(s.mesh, {"optimizer/own/head": Layout((4,))})
        object.__setattr__(s.optimizer, "registry", s.optimizer.registry | own)
        with pytest.raises(UserError) as refused:
            check_replicas(s)
        return f"{refused.value}"


def test_array_assumed_equal_on_replicas_is_refused(tmp_path):
    for said in get_pool(2).run(mixes, tmp_path / "run"):
        assert "the array optimizer/own/head is registered as equal on all ranks along dp_replicate" in said
