"""Object stores that fsspec opens: every request is retried until a deadline, and ranges are fetched in parallel."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import sync

from gangline.storage.retry import get_http_status
from gangline_ckpt_zarr.stores.base import ObjectStore, ObjectWriter, plan_deletion
from gangline_ckpt_zarr.stores.ranges import Fetch, plan_fetches
from gangline_ckpt_zarr.stores.retry import retry_request

SIDE_BY_SIDE = 8  # number of parallel requests: one stream from an object store has some 60 MB/s
REQUEST_SECONDS = 60.0  # time-out of one request, which is then retried
_STREAM_BLOCK = 16 << 20


class RemoteStore(ObjectStore, ABC):
    """Store that reads, lists and deletes through a file system of fsspec; subclasses define how to write objects."""

    def __init__(
        self, url: str, deadline_seconds: float, request_seconds: float = REQUEST_SECONDS, **options: Any
    ) -> None:
        self.url, self._deadline_seconds, self._request_seconds = url, deadline_seconds, request_seconds
        self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        self._root = self._root.rstrip("/")
        self._pool = ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="store")

    def read(self, path: str) -> bytes:
        return self._ask(path, "cat_file", self._get_full_path(path))

    def read_into(self, path: str, ranges: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        for _ in self._pool.map(lambda fetch: self._fetch(path, fetch), plan_fetches(ranges)):
            pass

    def size(self, path: str) -> int:
        return int(self._ask(path, "info", self._get_full_path(path))["size"])

    def exists(self, path: str) -> bool:
        try:
            return self._ask(path, "info", self._get_full_path(path))["type"] == "file"
        except FileNotFoundError:
            return False

    def names(self, path: str = "") -> list[str]:
        place = self._get_full_path(path)
        try:
            paths = self._ask(path, "ls", place, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {full.rstrip("/").rpartition("/")[2] for full in paths if self._is_below(full, place)}
        return sorted(names)

    def list_holders(self, name: str) -> list[str]:
        places = self.names()
        there = self._pool.map(lambda place: self.exists(f"{place}/{name}"), places)
        return [place for place, has in zip(places, there, strict=True) if has]

    def walk(self, path: str = "") -> list[str]:
        place = self._get_full_path(path)
        try:
            paths = self._ask(path, "find", place)
        except FileNotFoundError:
            return []
        return sorted(self._get_relative_path(full) for full in paths if self._is_below(full, place))

    def list_sizes(self, path: str = "") -> dict[str, int]:
        place = self._get_full_path(path)
        try:
            files = self._ask(path, "find", place, detail=True)
        except FileNotFoundError:
            return {}
        return {
            name.removeprefix(f"{place}/"): int(facts["size"] or 0)
            for name, facts in files.items()
            if self._is_below(name, place)
        }

    def delete(self, path: str) -> None:
        for paths in plan_deletion(self.walk(path) or [path]):
            self._remove(paths)

    def close(self) -> None:
        self._pool.shutdown()

    def _remove(self, paths: Sequence[str]) -> None:
        def remove(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._ask(path, "rm_file", self._get_full_path(path))

        for _ in self._pool.map(remove, paths):
            pass

    def _fetch(self, path: str, fetch: Fetch) -> None:
        try:
            got = self._ask(path, "cat_file", self._get_full_path(path), start=fetch.start, end=fetch.stop)
        except OSError as error:
            if get_http_status(error) != 416:
                raise
            got = b""  # HTTP 416: the complete range is past the end of the object
        if len(got) < fetch.stop - fetch.start:
            raise EOFError(f"{self._format_url(path)} ends at byte {fetch.start + len(got)}, before byte {fetch.stop}")
        fetch.fill(got)

    def _ask(self, path: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the file system until it succeeds or the deadline has passed."""
        where, seconds = self._format_url(path), self._deadline_seconds
        return retry_request(lambda left: self._call_once(left, method, *args, **kwargs), where, seconds)

    def _call_once(self, left: float, method: str, *args: Any, **kwargs: Any) -> Any:
        if not self._fs.async_impl:
            return getattr(self._fs, method)(*args, **kwargs)
        seconds = max(min(left, self._request_seconds), 0.001)
        return sync(self._fs.loop, _run_in_time, seconds, getattr(self._fs, f"_{method}"), args, kwargs)

    def _get_full_path(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _get_relative_path(self, full: str) -> str:
        return full.removeprefix(f"{self._root}/")

    def _is_below(self, full: str, place: str) -> bool:
        return full.rstrip("/").startswith(f"{place}/")

    def _format_url(self, path: str) -> str:
        """Return the URL of an object for messages, without a password that the store's URL may hold."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}/{path}"


class FsspecStore(RemoteStore):
    """Store on any of fsspec's file systems. `commit` is as atomic as the driver's ``pipe_file(mode="create")``."""

    def create(self, path: str, size: int) -> ObjectWriter:
        """Create an object as one stream, by fsspec's own file object. Raises FileExistsError, OSError."""
        if self.exists(path):
            raise FileExistsError(f"{self._format_url(path)} exists already")
        return _Stream(self, path, size)

    def commit(self, path: str, content: bytes) -> None:
        """Write an object, atomic as the driver's ``pipe_file(mode="create")``. Raises FileExistsError, OSError."""
        if self.exists(path):  # never overwrite, even if the store ignores mode="create"
            raise FileExistsError(f"{self._format_url(path)} exists already")
        tries = 0

        def commit_once(left: float) -> None:
            nonlocal tries
            tries += 1
            self._call_once(left, "pipe_file", self._get_full_path(path), content, mode="create")

        try:
            retry_request(commit_once, self._format_url(path), self._deadline_seconds)
        except FileExistsError:
            if tries == 1 or self.read(path) != content:  # else an earlier try, whose answer was lost, wrote it
                raise


class _Stream(ObjectWriter):
    """Writer through fsspec's own file object: one stream, with only the driver's retries."""

    def __init__(self, store: FsspecStore, path: str, size: int) -> None:
        self._store, self._path, self._size, self._written = store, path, size, 0
        self._file = store._fs.open(store._get_full_path(path), "wb", block_size=_STREAM_BLOCK)

    def write(self, content: memoryview) -> None:
        self._file.write(content)
        self._written += content.nbytes

    def close(self) -> None:
        if self._written != self._size:
            self.abort()
            raise ValueError(f"{self._path}: {self._written} bytes were written instead of {self._size}")
        self._file.close()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            if hasattr(self._file, "discard"):
                self._file.discard()
            self._store._fs.rm_file(self._store._get_full_path(self._path))


async def _run_in_time(seconds: float, act: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `act` returns. If that takes longer than `seconds`, cancel it and raise TimeoutError."""
    return await asyncio.wait_for(act(*args, **kwargs), seconds)
