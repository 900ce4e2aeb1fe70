"""Checkpointer on any implementation of the job store, with short and permanent outages of the store."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from made import composed

from gangline.checkpoint.base import SaveFailed
from gangline.checkpoint.id import CheckpointId
from gangline.mesh import Mesh
from gangline_ckpt_zarr import agreement
from gangline_ckpt_zarr.agreement import Agreement, Failed, PrefixedStore, StoreLost
from gangline_ckpt_zarr.checkpointer import ZarrCheckpointer, build
from gangline_testkit import checkpointer_ranks as kit, rank
from gangline_testkit.pool import get_pool
from gangline_testkit.sessions import open_session

MESH = Mesh.of({"dp_shard": 2})


class DictStore:
    """Job store in memory that cannot be reached for the next `lost` requests."""

    def __init__(self, lost: int = 0) -> None:
        self.kept: dict[str, bytes] = {}
        self.lost = lost

    def _reach(self) -> dict[str, bytes]:
        if self.lost:
            self.lost -= 1
            raise ConnectionError("the store is lost for a while")
        return self.kept

    def set(self, key: str, value: str | bytes) -> None:
        self._reach()[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self._reach()[key]

    def add(self, key: str, amount: int) -> int:
        kept = self._reach()
        kept[key] = str(int(kept.get(key, b"0")) + amount).encode()
        return int(kept[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self._reach() for key in keys)


def test_a_checkpointer_is_built_on_any_store(tmp_path: Path) -> None:
    s = open_session(tmp_path / "out", "checkpoint=zarr")
    store = DictStore()
    made = build(s.run.checkpoint, s.run, store)
    assert made.list() == []
    made.close()
    assert store.kept == {"ckpt/made by 0": b"1"}


def test_brief_store_outage_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_LONGEST", 0.001)
    lost = DictStore()
    store = PrefixedStore(lost, "ckpt/1")
    assert store.add("count", 2) == 2
    lost.lost = 3
    assert store.add("count", 0) == 2
    lost.lost = 3
    store.set("key", "value")
    assert (store.get("key"), store.check(["key", "count"]), store.check(["other"])) == (b"value", True, False)
    assert sorted(lost.kept) == ["ckpt/1/count", "ckpt/1/key"]


def test_permanent_store_outage_raises_store_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_UNREACHED", 0.01)
    monkeypatch.setattr(agreement, "_LONGEST", 0.001)
    with pytest.raises(
        StoreLost, match="the connection to the job's key-value store is lost: the store is lost for a while"
    ):
        PrefixedStore(DictStore(lost=10**9), "ckpt/1").get("key")


class ForgetfulStore(DictStore):
    """Job store that executes each `add` and loses the answer."""

    def add(self, key: str, amount: int) -> int:
        found = super().add(key, amount)
        if amount:
            raise ConnectionError("the answer is lost")
        return found


def test_add_with_lost_answer_is_not_retried() -> None:
    """Check that no rank counts twice, which would complete a checkpoint without the file of the other rank."""
    store = ForgetfulStore()
    one = Agreement(PrefixedStore(store, "ckpt/1"), "save/1", 1, 2, 60.0, "newest")
    with pytest.raises(StoreLost):
        one.mark_done("written")
    assert store.kept["ckpt/1/save/1/written"] == b"1"
    one.send_heartbeat()
    one.fail("it is lost", late=True)
    with pytest.raises(Failed, match="it is lost"):
        Agreement(PrefixedStore(store, "ckpt/1"), "save/1", 0, 2).check()


class Relay:
    """Relay between a client and a TCPStore that can cut open connections; it still accepts new ones afterwards."""

    def __init__(self, port: int) -> None:
        self._port, self._cut = port, False
        self._open: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.deaf = False  # if true, drop the answers of the store and disconnect the client
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += [near, far]
                threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                if answers and self.deaf:
                    target.shutdown(socket.SHUT_RDWR)
                    return
                target.sendall(content)

    def close(self) -> None:
        for one in (self._listening, *self._open):
            one.close()


@pytest.fixture
def stores() -> Iterator[tuple[dist.TCPStore, dist.TCPStore, Relay]]:
    """Yield the store of a job, a client whose connection can be cut, and the relay that cuts the connection."""
    limit = timedelta(seconds=60)
    master = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=limit, wait_for_workers=False)
    relay = Relay(master.port)
    yield master, dist.TCPStore("127.0.0.1", relay.port, 2, timeout=limit, wait_for_workers=False), relay
    relay.close()


def test_broken_tcp_store_connection_is_not_retried(
    stores: tuple[dist.TCPStore, dist.TCPStore, Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set an endless retry time: the loss of a broken connection is still reported at once."""
    monkeypatch.setattr(agreement, "_UNREACHED", 10**9)
    master, client, relay = stores
    store = PrefixedStore(client, "ckpt/1")  # type: ignore[arg-type]
    store.set("key", "value")
    assert (store.add("count", 1), store.get("key")) == (1, b"value")
    relay.deaf = True
    with pytest.raises(StoreLost, match="the connection to the job's key-value store is lost: "):
        store.add("count", 1)
    relay.deaf = False
    assert master.add("ckpt/1/count", 0) == 2, "it was done, though nobody was told"
    for ask in (lambda: store.add("count", 1), lambda: store.get("key"), lambda: store.set("key", "other")):
        with pytest.raises(StoreLost):
            ask()
    assert master.add("ckpt/1/count", 0) == 2
    assert Agreement(store, "save/1", 1, 2, 60.0).send_heartbeat() is None  # type: ignore[arg-type]


class CutOff:
    """Store client of a rank that loses its connection during the first `add` to the given counter."""

    def __init__(self, store: PrefixedStore, counter: str) -> None:
        self._store, self._counter, self._cut = store, counter, False

    def _reach(self) -> PrefixedStore:
        if self._cut:
            raise StoreLost("the connection to the job's key-value store is lost: Broken pipe")
        return self._store

    def set(self, key: str, value: str | bytes) -> None:
        self._reach().set(key, value)

    def get(self, key: str) -> bytes:
        return self._reach().get(key)

    def check(self, keys: list[str]) -> bool:
        return self._reach().check(keys)

    def add(self, key: str, amount: int) -> int:
        found = self._reach().add(key, amount)
        self._cut = amount > 0 and key.endswith(self._counter)
        if self._cut:
            raise StoreLost("the connection to the job's key-value store is lost: Broken pipe")
        return found


def saved_by_one_that_is_cut_off(job: kit.CheckpointerJob) -> tuple[str, list[str]]:
    checkpointer = kit.open_checkpointer(job)
    assert isinstance(checkpointer, ZarrCheckpointer)
    store = checkpointer.store
    assert isinstance(store, PrefixedStore)
    if rank.index == 1:
        checkpointer.store = CutOff(store, "disk written")
    try:
        came = str(kit.save_with(checkpointer, job, 1, 1).id)
    except SaveFailed as failed:
        came = failed.why
    checkpointer.store = store
    checkpointer.close()
    # The disconnected rank must end before the other rank commits.
    rank.make_comms(job.mesh).world.all_reduce(torch.zeros(1))
    checkpointer = kit.open_checkpointer(job)
    registry = kit.build_registry(job.mesh)
    shards = kit.make_shards(registry, None)
    checkpointer.load(CheckpointId(1), shards, registry)
    checkpointer.close()
    return came, kit.find_wrong(shards, 1)


def test_file_of_disconnected_rank_is_still_committed(tmp_path: Path) -> None:
    """Check that the other ranks count the file and commit it."""
    job = kit.CheckpointerJob("gangline_ckpt_zarr.checkpointer:build", composed(tmp_path), MESH, str(tmp_path))
    first, second = get_pool(2).run(saved_by_one_that_is_cut_off, job)
    assert first == ("step-00000001", [])
    assert second == ("the connection to the job's key-value store is lost: Broken pipe", [])
