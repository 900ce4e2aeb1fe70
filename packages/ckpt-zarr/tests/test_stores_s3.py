"""S3 store against a real server behind a faulty proxy: no lost object, no partial object, no hang."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from urllib.request import Request, urlopen

import fsspec
import pytest
from aiobotocore.session import AioSession
from faulty_proxy import Asked, FaultyProxy
from moto.server import ThreadedMotoServer

from gangline_ckpt_zarr.stores.base import ObjectStore, StoreError
from gangline_ckpt_zarr.stores.open import open_store
from gangline_ckpt_zarr.stores.s3 import S3Store, choose_part_bytes

MIB = 1 << 20
PART = MIB  # S3 itself requires at least 5 MiB
BUCKETS = count()


@dataclass
class Place:
    url: str
    proxy: FaultyProxy

    def store(self, deadline: float = 20, request: float = 5) -> S3Store:
        return S3Store(self.url, deadline, request, PART)


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with FaultyProxy(server.get_host_and_port()[1]) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setattr("gangline.storage.retry.FIRST_SECONDS", 0.01)
        # Parses the S3 service description only once.
        patch.setitem(fsspec.config.conf, "s3", {"session": AioSession()})
        patch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
        yield proxy
    server.stop()


@pytest.fixture
def place(proxy: FaultyProxy) -> Place:
    proxy.reset()
    bucket = f"bucket-{next(BUCKETS)}"
    with urlopen(Request(f"{proxy.url}/{bucket}", method="PUT")):
        proxy.reset()
    return Place(f"s3://{bucket}/runs/one", proxy)


def put(store: ObjectStore, path: str, content: bytes, block: int = 288 << 10) -> None:
    writer = store.create(path, len(content))
    view = memoryview(content)
    for first in range(0, len(content), block):
        writer.write(view[first : first + block])
    writer.close()


def methods(place: Place, mark: str) -> int:
    return sum(mark in f"{asked.method} {asked.path}" for asked in place.proxy.seen)


def test_small_and_multipart_objects_are_read_back(place: Place) -> None:
    store = place.store()
    for size in (0, 1, PART, PART + 1, 2 * PART + 4097):
        content = os.urandom(size)
        put(store, f"a/{size}", content)
        assert store.read(f"a/{size}") == content
        assert store.size(f"a/{size}") == size
    assert methods(place, "PUT") == 3 + 2 + 3  # one request for each of three small objects, then one for each part


def test_multipart_upload_has_at_most_10000_parts() -> None:
    assert choose_part_bytes(1000, 16 * MIB) == 16 * MIB
    for size in (160_000 * MIB, 160_001 * MIB, 5 << 40):
        part = choose_part_bytes(size, 16 * MIB)
        assert -(-size // part) <= 10_000
        assert part % MIB == 0


def test_create_refuses_existing_object(place: Place) -> None:
    store = place.store()
    put(store, "a", b"first")
    with pytest.raises(FileExistsError, match="runs/one/a"):
        store.create("a", 5)
    assert store.read("a") == b"first"


def test_writer_with_too_few_bytes_leaves_no_object(place: Place) -> None:
    store = place.store()
    writer = store.create("a", 3 * PART)
    writer.write(memoryview(bytes(2 * PART)))
    with pytest.raises(ValueError, match="bytes were written instead of"):
        writer.close()
    assert not store.exists("a")
    assert uploads(store) == 0


def uploads(store: S3Store) -> int:
    found = store._fs.call_s3("list_multipart_uploads", Bucket=store._bucket)
    return len(found.get("Uploads", ()))


def test_delete_aborts_unfinished_upload(place: Place) -> None:
    store = place.store()
    writer = store.create("step-1/data/0.bin", 3 * PART)
    writer.write(memoryview(bytes(2 * PART)))
    assert uploads(store) == 1
    assert store.walk() == []
    place.store().delete("step-1")  # as another process does after this one was killed
    assert uploads(store) == 0


def test_commit_refuses_existing_object(place: Place) -> None:
    store, other = place.store(), place.store()
    store.commit("step-1/zarr.json", b"mine")
    with pytest.raises(FileExistsError):
        other.commit("step-1/zarr.json", b"theirs")
    # The server refuses too, for a client that looked before the object existed.
    with pytest.raises(FileExistsError):
        other.put_new("step-1/zarr.json", b"mine")
    assert store.read("step-1/zarr.json") == b"mine"


def test_one_of_concurrent_commits_succeeds(place: Place) -> None:
    stores = [place.store() for _ in range(4)]
    won: list[int] = []

    def commit(number: int) -> None:
        try:
            stores[number].put_new("zarr.json", b"%d" % number)
            won.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].read("zarr.json") == b"%d" % won[0]
    assert len(won) == 1


def is_commit(asked: Asked) -> bool:
    return asked.method == "PUT" and "zarr.json" in asked.path


def test_commit_with_lost_answer_succeeds(place: Place) -> None:
    first = [True]

    def fault(asked: Asked) -> str | None:
        return "lose" if is_commit(asked) and first and first.pop() else None

    place.proxy.fault = fault
    store = place.store()
    store.commit("zarr.json", b"mine")
    assert methods(place, "PUT") == 2
    assert store.read("zarr.json") == b"mine"


def test_retried_commit_after_another_writer_is_refused(place: Place) -> None:
    store, other = place.store(), place.store()

    def fault(asked: Asked) -> int | None:
        return 503 if is_commit(asked) and methods(place, "PUT") == 1 else None

    place.proxy.fault = fault
    done = threading.Event()
    original = store._call_once

    def slowed(left: float, method: str, *args: object, **kwargs: object) -> object:
        try:
            return original(left, method, *args, **kwargs)
        except OSError:
            if not done.is_set():
                done.set()
                other.put_new("zarr.json", b"same words")
            raise

    store._call_once = slowed  # type: ignore[method-assign]
    with pytest.raises(FileExistsError):
        store.put_new("zarr.json", b"same words")


def test_upload_with_lost_final_answer_succeeds(place: Place) -> None:
    # Pops a lost answer first, then 404, because S3 may no longer know the upload.
    ends: list[int | str] = [404, "lose"]

    def fault(asked: Asked) -> int | str | None:
        return ends.pop() if asked.method == "POST" and "uploadId" in asked.path and ends else None

    place.proxy.fault = fault
    store, content = place.store(), os.urandom(2 * PART)
    put(store, "a", content)
    assert store.read("a") == content


def test_upload_aborted_elsewhere_fails(place: Place) -> None:
    place.proxy.fault = lambda asked: 404 if asked.method == "POST" and "uploadId" in asked.path else None
    store = place.store()
    with pytest.raises(OSError, match="runs/one/a"):
        put(store, "a", bytes(2 * PART))
    assert not store.exists("a")


@pytest.mark.parametrize("fault", [503, 500, 429, "reset", "lose"])
def test_store_works_if_every_third_request_fails(place: Place, fault: int | str) -> None:
    place.proxy.fault = lambda asked: fault if asked.number % 3 == 1 else None
    store, content = place.store(), os.urandom(3 * PART + 5)
    put(store, "step-1/data/0.bin", content)
    store.commit("step-1/zarr.json", b"{}")
    got = bytearray(len(content))
    store.read_into("step-1/data/0.bin", [(0, [memoryview(got)])])
    assert bytes(got) == content
    assert store.walk() == ["step-1/data/0.bin", "step-1/zarr.json"]
    assert store.names() == ["step-1"]
    store.delete("step-1")
    assert store.names() == []


def test_hanging_request_is_retried(place: Place) -> None:
    place.proxy.fault = lambda asked: "hang" if asked.number == 1 else None
    store = place.store(request=0.3)
    store.commit("zarr.json", b"{}")
    assert store.read("zarr.json") == b"{}"


@pytest.mark.parametrize("fault", [503, "hang"])
def test_timeout_error_names_path_without_secret(place: Place, fault: int | str) -> None:
    store = place.store(deadline=0.5, request=0.2)
    place.proxy.fault = lambda asked: fault
    with pytest.raises(StoreError) as caught:
        store.commit("step-1/zarr.json", b"{}")
    assert f"{place.url}/step-1/zarr.json" in str(caught.value)
    assert "0.5 s" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_store_outage_during_write_leaves_no_object(place: Place) -> None:
    store = place.store()
    writer = store.create("a", 4 * PART)
    writer.write(memoryview(bytes(PART)))
    writer._sent[0].result()
    store._deadline_seconds = 0.5
    place.proxy.fault = lambda asked: 503
    writer.write(memoryview(bytes(3 * PART)))
    with pytest.raises(StoreError):
        writer.close()
    writer.abort()
    place.proxy.reset()
    assert place.store().walk() == []


def test_permanent_error_is_not_retried(place: Place) -> None:
    store = place.store()
    place.proxy.fault = lambda asked: 403
    with pytest.raises(PermissionError, match="runs/one/a"):
        store.read("a")
    assert len(place.proxy.seen) <= 2
    place.proxy.reset()
    with pytest.raises(FileNotFoundError, match="runs/one/a"):
        store.read("a")


def test_read_into_merges_neighboring_ranges(place: Place) -> None:
    store, content = place.store(), os.urandom(3 * MIB)
    put(store, "a", content)
    place.proxy.reset()
    wanted = [(2 * MIB, 5000), (10, 100), (200, 7), (MIB, 0), (MIB + 5, 4096)]
    buffers = [[memoryview(bytearray(size - size // 3)), memoryview(bytearray(size // 3))] for _, size in wanted]
    store.read_into("a", [(offset, pair) for (offset, _), pair in zip(wanted, buffers, strict=True)])
    for (offset, size), pair in zip(wanted, buffers, strict=True):
        assert b"".join(pair) == content[offset : offset + size]
    assert methods(place, "GET") == 3  # neighboring ranges in one request


def test_read_beyond_end_or_missing_object_raises(place: Place) -> None:
    store = place.store()
    put(store, "a", bytes(1000))
    for offset in (990, 1000, 5000):
        with pytest.raises(EOFError, match="runs/one/a"):
            store.read_into("a", [(offset, [memoryview(bytearray(20))])])
    with pytest.raises(FileNotFoundError):
        store.read_into("b", [(0, [memoryview(bytearray(20))])])


def test_listing_methods_return_stored_paths(place: Place) -> None:
    store = place.store()
    assert store.names() == []
    assert not store.exists("step-1")
    put(store, "step-1/data/0.bin", b"0")
    store.commit("step-1/zarr.json", b"{}")
    put(store, "step-2/data/0.bin", b"0")
    put(store, "step-22/data/0.bin", b"0")
    place.proxy.reset()
    assert store.names() == ["step-1", "step-2", "step-22"]
    assert len(place.proxy.seen) == 1
    assert store.names("step-1") == ["data", "zarr.json"]
    assert store.list_holders("zarr.json") == ["step-1"]
    assert store.walk("step-2") == ["step-2/data/0.bin"]
    assert not store.exists("step-1")
    with pytest.raises(FileNotFoundError):
        store.size("step-9/zarr.json")


def test_delete_removes_metadata_first(place: Place) -> None:
    store = place.store()
    put(store, "step-1/a.bin", b"0")
    store.commit("step-1/zarr.json", b"{}")
    store._deadline_seconds = 3.0  # long enough for the first of the two requests on a busy machine
    posts = [0]

    def fault(asked: Asked) -> int | None:
        posts[0] += asked.method == "POST"
        return 503 if posts[0] > 1 else None

    place.proxy.fault = fault
    with pytest.raises(StoreError):
        store.delete("step-1")
    place.proxy.reset()
    store = place.store()
    assert store.walk() == ["step-1/a.bin"]
    store.delete("step-1")
    store.delete("step-1")
    assert store.walk() == []


def test_open_store_returns_s3_store(place: Place) -> None:
    store = open_store(place.url, deadline_seconds=60)
    assert isinstance(store, S3Store)
    assert not store.local
    store.commit("zarr.json", b"{}")
    assert place.store().read("zarr.json") == b"{}"
