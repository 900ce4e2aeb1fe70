"""Shared reads of replicas from a real S3 server, which sends each byte of data once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from urllib.request import Request, urlopen

import made
import pytest
import torch
from faulty_proxy import Asked, FaultyProxy
from moto.server import ThreadedMotoServer
from sharing_ranks import whole

from gangline.checkpoint.id import CheckpointId
from gangline.config.compose import compose_one
from gangline.mesh import Mesh
from gangline.shard import Division, Layout, Registry, Shard
from gangline_ckpt_zarr.format.dtypes import count_itemsize
from gangline_ckpt_zarr.stores.open import open_store
from gangline_ckpt_zarr.stores.ranges import GAP
from gangline_testkit import checkpointer_ranks as kit, rank
from gangline_testkit.pool import get_pool

MESH = Mesh.of({"dp_replicate": 2})
STEP = "step-00000003"


def registry() -> Registry:
    """Return arrays that both ranks hold, and one array of which each rank holds half."""
    halves = (Division(("dp_replicate",), ((0, 200, 400),)),)
    layouts = {f"model/whole.{number}": Layout((700, 300), "float32") for number in range(6)}
    layouts |= {"model/half": Layout((400, 300), "float32", halves), "model/count": Layout((), "int64")}
    return Registry.of(MESH, layouts)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with FaultyProxy(server.get_host_and_port()[1]) as proxy:
        for name, value in environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        with urlopen(Request(f"{proxy.url}/sharing", method="PUT")):
            pass
        yield proxy
    server.stop()


def environment(url: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "a-secret"}
    return keys | {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}


def load(job: kit.CheckpointerJob, variables: dict[str, str], names: tuple[str, ...] | None) -> tuple[list[str], int]:
    """Load arrays on this rank; return (arrays with wrong values, bytes of this rank's shards)."""

    os.environ.update(variables)
    checkpointer, found, shards = kit.open_checkpointer(job), registry(), []
    for name, layout in found.layouts.items():
        for box, primary in found.list_rank_boxes(name, rank.index) if names is None or name in names else ():
            dtype = getattr(torch, layout.dtype)
            shards.append(Shard(name, layout.shape, dtype, box.offset, torch.zeros(box.shape, dtype=dtype), primary))
    id = CheckpointId.parse(STEP)
    assert id is not None
    checkpointer.load(id, shards, found)
    checkpointer.close()
    values = {name: whole(name, layout) for name, layout in found.layouts.items()}
    wrong = [shard.name for shard in shards if not torch.equal(shard.local, values[shard.name][shard.box.slices])]
    return wrong, sum(shard.local.nbytes for shard in shards)


def sent(asked: list[Asked]) -> int:
    """Return the requested bytes of data files."""
    ranges = [
        re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers.get("Range", ""))
        for asked in asked
        if asked.method == "GET" and ".bin" in asked.path
    ]
    assert all(ranges), "a whole file was asked for"
    return sum(int(one[2]) - int(one[1]) + 1 for one in ranges if one is not None)


@pytest.mark.parametrize("shared", [True, False])
def test_two_replicas_fetch_a_checkpoint_once(tmp_path: Path, server: FaultyProxy, shared: bool) -> None:
    """Check also a load of some arrays, as sampling does: each rank reads them, so they are read twice."""
    url = f"s3://sharing/{tmp_path.name}"
    made.save(open_store(f"{url}/{STEP}"), registry(), whole, {"step": 3, "attempt": 1})
    run = compose_one(["recipe=tiny", "checkpoint=zarr", f"run.dir={tmp_path}", f"checkpoint.path={url}"])
    job = kit.CheckpointerJob("gangline_ckpt_zarr.checkpointer:build", run, MESH, str(tmp_path))
    server.reset()
    names = None if shared else tuple(name for name in registry() if name != "model/half")
    found = get_pool(2).run(load, job, environment(server.url), names)
    assert [wrong for wrong, _ in found] == [[], []]
    stored = sum(
        prod(layout.shape) * count_itemsize(layout.dtype)
        for name, layout in registry().layouts.items()
        if names is None or name in names
    )
    got = sent(server.seen)
    if shared:
        assert stored <= got < 1.1 * stored + GAP  # including checksums, seals and gaps between neighbors
        assert sum(own for _, own in found) > 1.8 * stored
    else:
        assert got >= 2 * stored
