"""What one node's memory asks of another's keeper, and what is done with what strangers ask."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from made import save, small

from gangline.checkpoint import CheckpointId
from gangline_ckpt_zarr.stores.local import LocalStore
from gangline_ckpt_zarr.tiers import keeper, peers
from gangline_ckpt_zarr.tiers.keeper import Server
from gangline_ckpt_zarr.tiers.memory_store import MemoryStore
from gangline_ckpt_zarr.tiers.peers import Address, Peer, announce, announced, reached, withdraw
from gangline_ckpt_zarr.tiers.survey import survivors


@pytest.fixture
def node(tmp_path: Path) -> Peer:
    """A node whose keeper answers; its memory is `tmp_path / "b"`."""
    (tmp_path / "b").mkdir()
    server = Server(tmp_path / "b")
    announce(tmp_path, Address("b", os.uname().nodename, server.port, server.token))
    return Peer(tmp_path, "b", patience=0.0)


def content(number: int, size: int = 300_000) -> bytes:
    return bytes([number]) * size


def put(node: Peer, folder: Path, step: int, rank: int = 3) -> str:
    path = f"step-{step:08d}/data-0000000{step}/{rank:05d}.bin"
    (folder / "mine").write_bytes(content(step))
    node.put(path, folder / "mine")
    return path


def test_a_file_is_kept_and_given_back(node: Peer, tmp_path: Path) -> None:
    path = put(node, tmp_path, 1)
    assert (tmp_path / "b" / path).read_bytes() == content(1)
    assert node.sizes() == {path: 300_000}
    first, second, third = bytearray(10), bytearray(100), bytearray(5)
    (tmp_path / "b" / path).write_bytes(bytes(range(256)) * 4)
    node.read_into(path, [(250, [memoryview(first)]), (3, [memoryview(second), memoryview(third)])])
    assert first == bytes([*range(250, 256), 0, 1, 2, 3])
    assert second + third == bytes(range(3, 108))
    assert node.read(path) == bytes(range(256)) * 4
    node.drop(path)
    assert node.sizes() == {}
    assert list((tmp_path / "b").glob("step-*")) == []


def test_two_copies_of_a_rank_are_kept_and_the_newest_always_is(node: Peer, tmp_path: Path) -> None:
    other = put(node, tmp_path, 1, rank=4)
    inodes = set()
    for step in range(1, 8):
        path = put(node, tmp_path, step)
        inodes.add((tmp_path / "b" / path).stat().st_ino)
        held = sorted(name for name in node.sizes() if name != other)
        assert [int(name[5:13]) for name in held] == [*range(max(1, step - 1), step + 1)]
        assert (tmp_path / "b" / held[-1]).read_bytes() == content(step)
    assert len(inodes) == 2, "memory is used again: fresh pages cost several times the copy"
    assert other in node.sizes()


def test_a_copy_that_breaks_off_is_no_copy(node: Peer, tmp_path: Path) -> None:
    put(node, tmp_path, 1)
    address = peers._read(tmp_path / peers.FOLDER / "b.json")
    with socket.create_connection(("127.0.0.1", address.port)) as connection:
        asked = {"do": "put", "path": "step-00000002/data-1/00003.bin", "size": 100}
        connection.sendall(f"{address.token}\n{json.dumps(asked)}\nhalf".encode())
        connection.shutdown(socket.SHUT_WR)
        assert b"it broke off" in connection.recv(1000)
    assert [name[:13] for name in node.sizes()] == ["step-00000001"]
    assert list((tmp_path / "b" / "spare").iterdir()) == []


@pytest.mark.parametrize(
    "path", ["../secret", "step-00000001/../../secret", "/etc/passwd", "spare/x", "step-00000001//x"]
)
def test_nothing_outside_of_checkpoints_is_given(node: Peer, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(FileNotFoundError):
        node.read(path)


def test_a_stranger_gets_no_answer(node: Peer, tmp_path: Path) -> None:
    address = peers._read(tmp_path / peers.FOLDER / "b.json")
    assert (tmp_path / peers.FOLDER / "b.json").stat().st_mode & 0o077 == 0
    for said in (b"guess" * 7, b"GET / HTTP/1.1\r\n\r\nAccept: text/html\r\n\r\n", b"x" * 100_000, b"\xff" * 33):
        with socket.create_connection(
            ("127.0.0.1", address.port), timeout=5.0
        ) as connection:  # and is not read to an end
            connection.sendall(said)
            assert heard(connection) == b""


def heard(connection: socket.socket) -> bytes:
    """Until the other end closes. Raises TimeoutError where it does not."""
    try:
        return connection.recv(100)
    except ConnectionResetError:  # it has closed before it has read all
        return b""


@pytest.mark.parametrize("said", [b"", b"x"])
def test_a_stranger_who_says_little_holds_no_thread(
    node: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """Also one who says a byte now and then: the time is for all of the token."""
    monkeypatch.setattr(keeper, "TOKEN_SECONDS", 0.5)
    address = peers._read(tmp_path / peers.FOLDER / "b.json")
    with socket.create_connection(("127.0.0.1", address.port)) as connection:
        connection.settimeout(0.2)
        deadline = time.monotonic() + 60.0
        closed = False
        for _ in range(30):  # fewer bytes than the token has
            assert time.monotonic() < deadline
            with contextlib.suppress(TimeoutError):
                try:
                    connection.sendall(said)
                    closed = connection.recv(1) == b""
                except (BrokenPipeError, ConnectionResetError):
                    closed = True
            if closed:
                break
        assert closed


def test_a_put_names_the_file_of_one_rank(node: Peer, tmp_path: Path) -> None:
    kept = [put(node, tmp_path, step) for step in (1, 2)]
    for path in ("step-00000003", "step-00000003/x", "step-00000003/data-1/deeper/00003.bin"):
        with pytest.raises(OSError, match="is no file of a rank"):
            node.put(path, tmp_path / "mine")
    node.put("step-00000003/data-1/*", tmp_path / "mine")  # a name, and no pattern: other ranks' copies stay
    assert set(kept) < set(node.sizes())


def test_a_node_that_is_gone_is_named(node: Peer, tmp_path: Path) -> None:
    announce(tmp_path, Address("c", os.uname().nodename, 1, "x"))
    assert announced(tmp_path) == ["b", "c"]
    assert reached(tmp_path, ["b", "c", "d"]) == {"b": {}, "c": {}, "d": {}}
    with pytest.raises(OSError, match=r"node c does not answer: .*refused"):
        Peer(tmp_path, "c", patience=0.3).sizes()
    withdraw(tmp_path, Address("c", os.uname().nodename, 1, "another keeper's"))
    assert announced(tmp_path) == ["b", "c"]
    withdraw(tmp_path, Address("c", os.uname().nodename, 1, "x"))
    assert announced(tmp_path) == ["b"]


def test_who_asks_waits_for_a_keeper_that_is_about_to_start(node: Peer, tmp_path: Path) -> None:
    os.rename(tmp_path / peers.FOLDER / "b.json", tmp_path / "b.json")
    back = threading.Timer(0.5, os.rename, (tmp_path / "b.json", tmp_path / peers.FOLDER / "b.json"))
    back.start()
    assert Peer(tmp_path, "b", patience=60.0).sizes() == {}


def saved(place: Path) -> dict[str, int]:
    """A checkpoint of several ranks there, and its files."""
    save(str(place / "step-00000001"), small())
    return LocalStore(place).sizes()


def test_a_checkpoint_counts_where_all_its_files_are_somewhere(tmp_path: Path) -> None:
    files = saved(tmp_path / "whole")
    data = sorted(path for path in files if path.endswith(".bin"))
    assert len(data) > 1

    def read(node: str, path: str) -> bytes:
        return (tmp_path / "whole" / path).read_bytes()

    def part(*wanted: str) -> dict[str, int]:
        return {path: files[path] for path in wanted}

    root = "step-00000001/zarr.json"
    (found,), lost = survivors({"a": part(root, *data[:1]), "b": part(*data[1:])}, read)
    assert lost == {}
    assert found.nodes == {root: "a", data[0]: "a", **dict.fromkeys(data[1:], "b")}
    lacks = {CheckpointId(1): f"{data[0].removeprefix('step-00000001/')} is missing"}
    assert survivors({"a": part(root, *data[1:]), "b": part(root)}, read) == ([], lacks)
    assert survivors({"a": part(*data), "b": {}}, read) == ([], {})
    assert survivors({"a": part(root, *data[:1]), "b": dict.fromkeys(data[1:], 1)}, read)[0] == []


def test_what_is_elsewhere_is_read_from_there(node: Peer, tmp_path: Path) -> None:
    files = saved(tmp_path / "b")
    store = MemoryStore(tmp_path / "a")
    assert store.sizes("step-00000001") == {}
    store.elsewhere = {path: (node, size) for path, size in files.items()}
    root = "step-00000001/zarr.json"
    assert store.read(root) == (tmp_path / "b" / root).read_bytes()
    assert store.exists(root)
    assert not (tmp_path / "a").exists()
    assert store.sizes() == files
    for path in files:
        found = bytearray(files[path])
        store.read_into(path, [(0, [memoryview(found)])])
        assert found == (tmp_path / "b" / path).read_bytes()
    store.delete("step-00000001")
    assert not store.exists(root)
    assert (tmp_path / "b" / root).exists()
