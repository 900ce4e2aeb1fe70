"""Memory tier between nodes: requests to the keeper of another node, and refused unauthenticated requests."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from made import save, small

from gangline import UserError
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.stores.local import LocalStore
from gangline_ckpt_zarr.tiers import copies as copies_module, handshake, peers, places, server as keeper_server
from gangline_ckpt_zarr.tiers.copies import Copies
from gangline_ckpt_zarr.tiers.keeper import choose_host
from gangline_ckpt_zarr.tiers.memory_store import MemoryStore
from gangline_ckpt_zarr.tiers.peers import (
    Address,
    Peer,
    PeerLost,
    announce,
    ask_peers,
    identify_machine,
    list_announced,
    withdraw,
)
from gangline_ckpt_zarr.tiers.server import Server
from gangline_ckpt_zarr.tiers.survey import find_survivors


@pytest.fixture
def node(tmp_path: Path) -> Peer:
    """Return a node with a running keeper; its memory is `tmp_path / "b"`."""
    (tmp_path / "b").mkdir()
    server = Server(tmp_path / "b")
    announce(tmp_path, Address("b", identify_machine(), server.port, server.token))
    return Peer(tmp_path, "b", patience=0.0)


def content(number: int, size: int = 300_000) -> bytes:
    return bytes([number]) * size


def put(node: Peer, folder: Path, step: int, rank: int = 3) -> str:
    path = f"step-{step:08d}/data-0000000{step}/{rank:05d}.bin"
    (folder / "mine").write_bytes(content(step))
    node.put(path, folder / "mine")
    return path


def test_keeper_stores_returns_and_drops_file(node: Peer, tmp_path: Path) -> None:
    path = put(node, tmp_path, 1)
    assert (tmp_path / "b" / path).read_bytes() == content(1)
    assert node.list_sizes() == {path: 300_000}
    first, second, third = bytearray(10), bytearray(100), bytearray(5)
    (tmp_path / "b" / path).write_bytes(bytes(range(256)) * 4)
    node.read_into(path, [(250, [memoryview(first)]), (3, [memoryview(second), memoryview(third)])])
    assert first == bytes([*range(250, 256), 0, 1, 2, 3])
    assert second + third == bytes(range(3, 108))
    assert node.read(path) == bytes(range(256)) * 4
    node.drop(path)
    assert node.list_sizes() == {}
    assert list((tmp_path / "b").glob("step-*")) == []


def test_keeper_keeps_newest_two_copies_per_rank(node: Peer, tmp_path: Path) -> None:
    other = put(node, tmp_path, 1, rank=4)
    inodes = set()
    for step in range(1, 8):
        path = put(node, tmp_path, step)
        inodes.add((tmp_path / "b" / path).stat().st_ino)
        held = sorted(name for name in node.list_sizes() if name != other)
        assert [int(name[5:13]) for name in held] == [*range(max(1, step - 1), step + 1)]
        assert (tmp_path / "b" / held[-1]).read_bytes() == content(step)
    assert len(inodes) == 2, "memory is used again: fresh pages cost several times the copy"
    assert other in node.list_sizes()


def test_interrupted_copy_is_discarded(node: Peer, tmp_path: Path) -> None:
    put(node, tmp_path, 1)
    address = peers._read(tmp_path / peers.FOLDER / "b.json")
    with socket.create_connection(("127.0.0.1", address.port)) as connection:
        asked = {"do": "put", "path": "step-00000002/data-1/00003.bin", "size": 100}
        handshake.ask(connection, address.token, 30.0)
        connection.sendall(json.dumps(asked).encode() + b"\nhalf")
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answers:
            assert [json.loads(line) for line in answers] == [{"go": True}, {"why": "the connection was closed"}]
    assert [name[:13] for name in node.list_sizes()] == ["step-00000001"]
    assert list((tmp_path / "b" / "spare").iterdir()) == []


@pytest.mark.parametrize(
    "path", ["../secret", "step-00000001/../../secret", "/etc/passwd", "spare/x", "step-00000001//x"]
)
def test_keeper_refuses_paths_outside_checkpoints(node: Peer, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(FileNotFoundError):
        node.read(path)


def test_keeper_ignores_client_without_token(node: Peer, tmp_path: Path) -> None:
    address = peers._read(tmp_path / peers.FOLDER / "b.json")
    assert (tmp_path / peers.FOLDER / "b.json").stat().st_mode & 0o077 == 0
    for said in (b"guess" * 7, b"GET / HTTP/1.1\r\n\r\nAccept: text/html\r\n\r\n", b"x" * 100_000, b"\xff" * 33):
        # The keeper closes the connection without reading all bytes.
        with socket.create_connection(("127.0.0.1", address.port), timeout=5.0) as connection:
            connection.sendall(said)
            assert heard(connection) == b""


def test_impostor_on_keeper_port_is_detected(tmp_path: Path) -> None:
    """Listen on the port of a killed keeper as another process that would accept any request."""
    there, got = socket.create_server(("127.0.0.1", 0)), bytearray()
    token = "0123456789abcdef" * 2
    announce(tmp_path, Address("b", identify_machine(), there.getsockname()[1], token))

    def answer() -> None:
        for _ in range(2):
            connection, _ = there.accept()
            with connection:
                got.extend(connection.recv(1 << 16))
                connection.sendall(b"f" * 32 + b" " + b"f" * 64 + b'\n{"sizes": {"step-00000009/zarr.json": 5}}\n')
                with contextlib.suppress(OSError):
                    got.extend(connection.recv(1 << 16))

    thread = threading.Thread(target=answer)
    thread.start()
    node = Peer(tmp_path, "b", patience=0.0)
    with pytest.raises(PeerLost, match="request to node b failed: another process listens on the keeper's port"):
        node.list_sizes()
    (tmp_path / "mine").write_bytes(b"weights")
    with pytest.raises(PeerLost, match="another process"):
        node.put("step-00000001/data-1/00003.bin", tmp_path / "mine")
    thread.join()
    there.close()
    assert token.encode() not in got
    assert b"weights" not in got
    assert b"data-1" not in got


def test_keeper_rejects_replayed_proof(node: Peer, tmp_path: Path) -> None:
    """Send the keeper's own proof back to it; proofs differ per connection, so an overheard proof is useless too."""
    address = peers._read(tmp_path / peers.FOLDER / "b.json")
    assert address is not None
    heard_before = []
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", address.port), timeout=5.0) as connection:
            connection.sendall(b"a" * 32 + b"\n")
            theirs, _, proof = connection.recv(1 << 10).strip().partition(b" ")
            assert (theirs, proof) not in heard_before
            heard_before.append((theirs, proof))
            connection.sendall(proof + b"\n" + b'{"do": "sizes"}\n')
            assert heard(connection) == b""


@pytest.mark.parametrize(
    "said",
    [
        {"node": "c"}, {"port": "80"}, {"port": 0}, {"port": 1 << 20}, {"node": 5}, {"token": ""}, {"machine": None},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_announcement_is_ignored(node: Peer, tmp_path: Path, said: dict[str, object]) -> None:
    place = tmp_path / peers.FOLDER / "b.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **said}))
    list_announced(tmp_path)
    with pytest.raises(PeerLost, match="the address of its keeper is missing or invalid"):
        node.list_sizes()
    assert ask_peers(tmp_path, ["b"]) == {"b": {}}


def test_announcement_by_link_or_other_user_is_ignored(
    node: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check addresses of other users and links, in case several users can write into the run directory."""
    place = tmp_path / peers.FOLDER / "b.json"
    assert node.list_sizes() == {}
    linked = place.with_name("c.json")
    linked.symlink_to(place)
    assert list_announced(tmp_path) == ["b"]
    linked.unlink()
    theirs = os.stat(place).st_uid + 1
    real = os.fstat

    def as_seen(handle: int) -> os.stat_result:
        seen = real(handle)
        other_owner = os.readlink(f"/proc/self/fd/{handle}") == str(place)
        return os.stat_result((*seen[:4], theirs, *seen[5:10])) if other_owner else seen

    monkeypatch.setattr(os, "fstat", as_seen)
    assert list_announced(tmp_path) == []
    with pytest.raises(PeerLost, match="the address of its keeper is missing or invalid"):
        node.list_sizes()
    monkeypatch.setattr(os, "fstat", lambda handle: os.stat_result((*real(handle)[:4], theirs, *real(handle)[5:10])))
    peers._find_own_uid.cache_clear()
    assert list_announced(tmp_path) == ["b"], "a server of files that gives all of this user's files another number"
    peers._find_own_uid.cache_clear()
    assert sorted(one.name for one in place.parent.iterdir()) == ["b.json", "lock"]


@pytest.mark.parametrize("how", ["a file", "a link", "open to all"])
def test_memory_directory_writable_by_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(places, "ROOT", tmp_path)
    places.make()
    places.make()
    assert places.locate_user().stat().st_mode & 0o077 == 0
    places.locate_user().rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    if how == "a file":
        places.locate_user().touch()
    elif how == "a link":
        places.locate_user().symlink_to(tmp_path / "theirs")
    else:
        places.locate_user().mkdir()
        places.locate_user().chmod(0o777)
    for ask in (places.refuse_other_owner, places.make):
        why = "could change the run's checkpoints in memory" if how == "open to all" else r"is not a directory\."
        wanted = rf"{why}(.|\n)*sudo rm -r /\S+\n(.|\n)*memory_every=null"
        with pytest.raises(UserError, match=wanted):
            ask()


def heard(connection: socket.socket) -> bytes:
    """Return the next bytes from the other end, empty once it has closed. Raise TimeoutError if neither happens."""
    try:
        return connection.recv(100)
    except ConnectionResetError:  # the other end closed before it read everything
        return b""


@pytest.mark.parametrize("said", [b"", b"x"])
def test_slow_client_without_token_is_disconnected(
    node: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """Check also a client that sends a byte now and then: the time limit is for the complete token."""
    monkeypatch.setattr(keeper_server, "TOKEN_SECONDS", 0.5)
    address = peers._read(tmp_path / peers.FOLDER / "b.json")
    with socket.create_connection(("127.0.0.1", address.port)) as connection:
        closed = False
        for number in range(30):  # fewer bytes than a token has
            connection.settimeout(0.2 if number < 15 else 5.0)
            with contextlib.suppress(TimeoutError):
                try:
                    connection.sendall(said)
                    closed = connection.recv(1) == b""
                except (BrokenPipeError, ConnectionResetError):
                    closed = True
            if closed:
                break
        assert closed


def test_put_and_drop_refuse_invalid_paths(node: Peer, tmp_path: Path) -> None:
    kept = [put(node, tmp_path, step) for step in (1, 2)]
    for file in (
        "",
        "/x",
        "/zarr.json",
        "/data-1/deeper/00003.bin",
        "/data-1/*",
        "/data-1/../00003.bin",
        "/data-1/00003.bin\n",
    ):
        for ask in (lambda path: node.put(path, tmp_path / "mine"), node.drop):
            with pytest.raises(OSError, match="is not a data file of a rank"):
                ask(f"step-00000002{file}")
    assert set(kept) == set(node.list_sizes())


def test_request_to_dead_node_names_node(node: Peer, tmp_path: Path) -> None:
    announce(tmp_path, Address("c", identify_machine(), 1, "x"))
    assert list_announced(tmp_path) == ["b", "c"]
    assert ask_peers(tmp_path, ["b", "c", "d"]) == {"b": {}, "c": {}, "d": {}}
    with pytest.raises(OSError, match=r"request to node c failed: .*refused"):
        Peer(tmp_path, "c", patience=0.3).list_sizes()
    withdraw(tmp_path, Address("c", identify_machine(), 1, "another keeper's"))
    assert list_announced(tmp_path) == ["b", "c"]
    withdraw(tmp_path, Address("c", identify_machine(), 1, "x"))
    assert list_announced(tmp_path) == ["b"]


def test_peer_waits_for_keeper_to_start(node: Peer, tmp_path: Path) -> None:
    os.rename(tmp_path / peers.FOLDER / "b.json", tmp_path / "b.json")
    back = threading.Timer(0.5, os.rename, (tmp_path / "b.json", tmp_path / peers.FOLDER / "b.json"))
    back.start()
    assert Peer(tmp_path, "b", patience=60.0).list_sizes() == {}


def saved(place: Path) -> dict[str, int]:
    """Save a checkpoint of several ranks and return the sizes of its files."""
    save(str(place / "step-00000001"), small())
    return LocalStore(place).list_sizes()


def test_checkpoint_with_files_spread_over_nodes_is_found(tmp_path: Path) -> None:
    files = saved(tmp_path / "whole")
    data = sorted(path for path in files if path.endswith(".bin"))
    assert len(data) > 1

    def read(node: str, path: str) -> bytes:
        return (tmp_path / "whole" / path).read_bytes()

    def part(*wanted: str) -> dict[str, int]:
        return {path: files[path] for path in wanted}

    root = "step-00000001/zarr.json"
    (found,), lost = find_survivors({"a": part(root, *data[:1]), "b": part(*data[1:])}, read)
    assert lost == {}
    assert found.nodes == {root: "a", data[0]: "a", **dict.fromkeys(data[1:], "b")}
    lacks = {CheckpointId(1): f"{data[0].removeprefix('step-00000001/')} is missing"}
    assert find_survivors({"a": part(root, *data[1:]), "b": part(root)}, read) == ([], lacks)
    assert find_survivors({"a": part(*data), "b": {}}, read) == ([], {})
    assert find_survivors({"a": part(root, *data[:1]), "b": dict.fromkeys(data[1:], 1)}, read)[0] == []


def test_memory_store_reads_files_of_other_nodes(node: Peer, tmp_path: Path) -> None:
    files = saved(tmp_path / "b")
    store = MemoryStore(tmp_path / "a")
    assert store.list_sizes("step-00000001") == {}
    store.elsewhere = {path: (node, size) for path, size in files.items()}
    root = "step-00000001/zarr.json"
    assert store.read(root) == (tmp_path / "b" / root).read_bytes()
    assert store.exists(root)
    assert not (tmp_path / "a").exists()
    assert store.list_sizes() == files
    for path in files:
        found = bytearray(files[path])
        store.read_into(path, [(0, [memoryview(found)])])
        assert found == (tmp_path / "b" / path).read_bytes()
    store.delete("step-00000001")
    assert not store.exists(root)
    assert (tmp_path / "b" / root).exists()


class Silent:
    """Keeper that accepts connections and never answers, like a stopped one, or sends only the given lines."""

    def __init__(self, run_dir: Path, name: str, *lines: bytes) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._lines, self._open = lines, []
        announce(run_dir, Address(name, identify_machine(), self._listening.getsockname()[1], "token"))
        self.asked = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._open.append(connection)
                self.asked += 1
                if self._lines:
                    handshake.admit(connection, "token", 30.0)
                    connection.recv(1 << 16)
                    connection.sendall(b"".join(self._lines))
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in (self._listening, *self._open):
            one.close()


def test_hung_node_delays_only_one_save_until_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("PATIENCE_SECONDS", "SILENT_SECONDS"):
        monkeypatch.setattr(copies_module, limit, 400.0)
    hung, beats = Silent(tmp_path, "c"), []
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "d").mkdir()
    other = Server(tmp_path / "d")
    announce(tmp_path, Address("d", identify_machine(), other.port, other.token))
    copies = Copies([Peer(tmp_path, "c"), Peer(tmp_path, "d")])
    began = time.monotonic()
    why = copies.put("step-00000001/data-1/00000.bin", tmp_path / "mine", 3.0, lambda: beats.append(1))
    took = time.monotonic() - began
    assert "request to node c failed: " in why
    assert took < 200, "its deadline is 3 seconds, and nothing else ends before 400"
    assert beats
    assert Peer(tmp_path, "d").list_sizes() == {"step-00000001/data-1/00000.bin": 4}, "the others keep theirs"
    asked = hung.asked
    for step in range(2, 6):
        assert copies.put(f"step-0000000{step}/data-1/00000.bin", tmp_path / "mine", 3.0, lambda: None) == why
    copies.drop("step-00000005/data-1/00000.bin")
    assert hung.asked == asked, "it is left alone for a while"
    assert sorted(Peer(tmp_path, "d").list_sizes()) == ["step-00000004/data-1/00000.bin"]
    hung.close()


def test_recovered_node_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    copies = Copies([Peer(tmp_path, "b")])
    assert "the address of its keeper is missing" in copies.put(
        "step-00000001/data-1/00000.bin", tmp_path / "mine", 0.1, lambda: None
    )
    (tmp_path / "b").mkdir()
    server = Server(tmp_path / "b")
    announce(tmp_path, Address("b", identify_machine(), server.port, server.token))
    deadline = time.monotonic() + 60.0
    while copies.put("step-00000002/data-1/00000.bin", tmp_path / "mine", 0.1, lambda: None):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_full_node_refuses_copy_and_keeps_files(node: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [put(node, tmp_path, step) for step in (1, 2)]
    with (tmp_path / "mine").open("wb") as file:  # more bytes than the socket buffers hold
        file.truncate(1 << 28)

    def full(handle: int, offset: int, size: int) -> None:
        os.ftruncate(handle, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(keeper_server.os, "posix_fallocate", full)
    patient = Peer(tmp_path, "b", patience=60.0)
    for rank in (3, 4):
        with pytest.raises(PeerLost, match=r"^node b: No space left on device$"):
            patient.put(f"step-00000003/data-1/{rank:05d}.bin", tmp_path / "mine")
    monkeypatch.undo()
    assert sorted(node.list_sizes()) == kept
    assert [(tmp_path / "b" / path).read_bytes() for path in kept] == [content(1), content(2)]
    assert list((tmp_path / "b" / "spare").iterdir()) == []
    put(node, tmp_path, 3)


def test_keeper_refuses_invalid_or_excessive_size(node: Peer, tmp_path: Path) -> None:
    for size, said in ((1 << 60, {"why": "No space left on device"}), (-1, None), ("1", None), (None, None)):
        address = peers._read(tmp_path / peers.FOLDER / "b.json")
        with socket.create_connection(("127.0.0.1", address.port), timeout=30.0) as connection:
            asked = {"do": "put", "path": "step-00000002/data-1/00003.bin", "size": size}
            handshake.ask(connection, address.token, 30.0)
            connection.sendall(json.dumps(asked).encode() + b"\n")
            answer = heard(connection)
            assert (json.loads(answer) if answer else None) == said
    assert node.list_sizes() == {}


@pytest.mark.parametrize("said", [b"1", b"{}", b"[]", b"null", b'{"do": "read"}', b'{"do": "read", "path": 1}', b"{"])
def test_malformed_request_closes_connection_without_traceback(
    node: Peer, tmp_path: Path, capfd: pytest.CaptureFixture[str], said: bytes
) -> None:
    address = peers._read(tmp_path / peers.FOLDER / "b.json")
    with socket.create_connection(("127.0.0.1", address.port), timeout=30.0) as connection:
        handshake.ask(connection, address.token, 30.0)
        connection.sendall(said + b"\n")
        assert heard(connection) == b""
    assert node.list_sizes() == {}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("limit", ["UNPROVEN", "UNPROVEN_OF_ADDRESS"])
def test_idle_unauthenticated_connections_do_not_block_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Check that a new connection replaces the oldest unauthenticated connection, and no other."""
    monkeypatch.setattr(keeper_server, limit, 3)
    monkeypatch.setattr(keeper_server, "TOKEN_SECONDS", 3600.0)
    (tmp_path / "b").mkdir()
    server = Server(tmp_path / "b")
    announce(tmp_path, Address("b", identify_machine(), server.port, server.token))
    with contextlib.ExitStack() as opened:

        def connect() -> socket.socket:
            return opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30.0))

        proven = connect()
        handshake.ask(proven, server.token, 30.0)
        while server._unproven:  # until the server has read the proof, the connection counts as unproven
            time.sleep(0.01)
        proven.sendall(b'{"do": "sizes"')  # the end of the request is sent below
        idle = [connect() for _ in range(8)]
        assert [heard(one) for one in idle[:5]] == [b""] * 5
        assert Peer(tmp_path, "b", patience=0.0).list_sizes() == {}
        proven.sendall(b"}\n")
        assert heard(proven) == b'{"sizes": {}}\n'


@pytest.mark.parametrize("lines", [(b'{"size": 100}\n', b"half"), (b"nonsense\n",), (b"1\n",)])
def test_truncated_answer_counts_node_as_lost(tmp_path: Path, lines: tuple[bytes, ...]) -> None:
    broken = Silent(tmp_path, "c", *lines)
    node = Peer(tmp_path, "c", patience=0.0)
    with pytest.raises(PeerLost, match="node c"):
        node.read("step-00000001/zarr.json")
    with pytest.raises(PeerLost, match="node c"):
        node.read_into("step-00000001/zarr.json", [(0, [memoryview(bytearray(50))])])
    held = {"c": {"step-00000001/zarr.json": 100}}
    ((id, why),) = find_survivors(held, lambda _, path: node.read(path))[1].items()
    assert (id, "node c" in why) == (CheckpointId(1), True)
    broken.close()


def test_read_beyond_file_end_raises_eof_error(node: Peer, tmp_path: Path) -> None:
    path = put(node, tmp_path, 1)
    with pytest.raises(EOFError, match="ends at byte 300000"):
        node.read_into(path, [(299_999, [memoryview(bytearray(2))])])


def test_concurrent_announce_and_withdraw_keep_successor(tmp_path: Path) -> None:
    """Announce a successor while its predecessor withdraws, in each of 300 rounds."""
    failed: list[BaseException] = []

    def run(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    for number in range(300):
        old, new = (Address("b", identify_machine(), number + one, "token") for one in (1, 2))
        announce(tmp_path, old)
        acts = [lambda old=old: withdraw(tmp_path, old), lambda new=new: announce(tmp_path, new)]
        threads = [threading.Thread(target=run, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert peers._read(tmp_path / peers.FOLDER / "b.json") == new
        withdraw(tmp_path, new)
        assert list_announced(tmp_path) == []


def test_address_uses_loopback_only_on_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Address("10.0.0.2/1", identify_machine(), 1, "").host == "127.0.0.1"
    assert Address("10.0.0.2/1", os.uname().nodename, 1, "").host == "10.0.0.2"
    assert identify_machine() != os.uname().nodename


@pytest.mark.parametrize(
    ("shares", "environ", "host"),
    [
        (False, {}, "127.0.0.1"),
        (False, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "127.0.0.1"),
        (False, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, ""),
        (True, {}, ""),
    ],
)
def test_single_machine_keeper_listens_only_on_loopback(tmp_path: Path, shares: bool, environ: dict, host: str) -> None:
    assert choose_host(shares, environ) == host
    server = Server(tmp_path, host)
    assert (server.socket.getsockname()[0] == "127.0.0.1") == bool(host)
    announce(tmp_path, Address("b", identify_machine(), server.port, server.token))
    assert Peer(tmp_path, "b").list_sizes() == {}
