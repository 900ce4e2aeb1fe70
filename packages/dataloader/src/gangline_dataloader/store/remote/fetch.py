"""Download of one file from an fsspec file system, in parallel ranges of 8 MiB, with retries until a deadline.

Single windows are never fetched: at 25 ms per request, windows of 4 kB arrive at 0.03 M tokens per second, a shard in
parallel ranges at more than 100 M tokens per second (measured).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from gangline import UserError
from gangline.storage.retry import RetryTimeout, get_http_status, retry

RANGE = 8 << 20  # bytes of a request
AT_ONCE = 16  # maximum parallel requests for a file
LOOKERS, LOOK = 32, 10.0  # maximum parallel requests for file sizes, and timeout in seconds for all sizes
# Class names of errors of botocore and google.auth, because the drivers may not be installed.
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}

log = logging.getLogger(__name__)


class Remote:
    """Files below a URL. `retries` counts the repeated requests.

    deadline  maximum seconds to wait for a file
    Raises UserError if no file system supports the URL.
    """

    def __init__(self, url: str, deadline: float) -> None:
        self.url, self.deadline, self.retries = url.rstrip("/"), deadline, 0
        self._counting = threading.Lock()
        try:
            import fsspec
        except ImportError as error:
            raise UserError(f"{url} needs fsspec.", "", "pip install 'gangline-dataloader[remote]'") from error
        try:
            self.files, self.root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UserError(f"{url} cannot be read.", str(error)) from error

    def read_small_file(self, name: str, optional: bool = False) -> bytes | None:
        """Read a small file with one request; None if it does not exist. Raises UserError past the deadline.

        optional  whether to return None also if access is denied, because S3 answers 403 for a missing file if names
                  may not be listed; otherwise UserError is raised
        """
        until = time.monotonic() + self.deadline
        try:
            return bytes(self._retry(name, lambda: self.files.cat_file(f"{self.root}/{name}"), until))
        except FileNotFoundError:
            return None
        except Exception as error:
            if not _is_denied(error):
                raise
            if not optional:
                raise self._explain_failure(name, error) from error
            log.warning("%s/%s: access denied (%s): treating the file as missing", self.url, name, error)
            return None

    def list_names(self) -> list[str]:
        """Return the names of the files; [] if the file system cannot list them."""
        return list(self._list())

    def find_file_sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        """Find the sizes of files in bytes; None: missing. Files of unknown size after `LOOK` seconds are left out."""
        listing = self._list()
        if any(listing.values()):  # a listing without sizes (http) has all links of a page
            return {name: listing.get(name) for name in names}
        sizes: dict[str, int | None] = {}
        until = time.monotonic() + LOOK

        def look(name: str) -> None:
            if time.monotonic() < until:
                try:
                    if (size := self.files.info(f"{self.root}/{name}").get("size")) is not None:
                        sizes[name] = int(size)
                except FileNotFoundError:
                    sizes[name] = None
                except Exception as error:  # the read of the file will report it
                    log.info("%s/%s: %s", self.url, name, error)

        with ThreadPoolExecutor(LOOKERS) as pool:
            list(pool.map(look, names))
        return sizes

    def _list(self) -> dict[str, int | None]:
        try:
            entries = self.files.ls(self.root, detail=True)
        except Exception as error:  # each file system raises its own types
            log.info("%s cannot be listed: %s", self.url, error)
            return {}
        return {str(one["name"]).rstrip("/").rpartition("/")[2]: one.get("size") for one in entries}

    def fetch(self, name: str, size: int, path: Path) -> None:
        """Fetch `size` bytes of a file into `path`. Raises UserError past the deadline, or if the file is shorter."""
        until = time.monotonic() + self.deadline
        starts = list(range(0, size, RANGE))[::-1]
        errors: list[BaseException] = []

        def work(file: BinaryIO) -> None:
            with file:
                while not errors:
                    with self._counting:
                        if not starts:
                            return
                        start = starts.pop()
                    try:
                        stop = min(size, start + RANGE)
                        content = self._retry(name, partial(self._read_range, name, start, stop), until)
                        os.pwrite(file.fileno(), content, start)
                    except BaseException as error:
                        errors.append(error)

        with path.open("wb") as file:
            os.ftruncate(file.fileno(), size)
            # Each thread has its own descriptor: a late thread must not write to a number that another file reuses.
            own = [os.fdopen(os.dup(file.fileno()), "wb") for _ in range(min(AT_ONCE, len(starts)))]
        threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in own]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not errors and any(thread.is_alive() for thread in threads):
            errors.append(TimeoutError("a request was not answered"))
        if errors:
            raise self._explain_failure(name, errors[0])

    def _read_range(self, name: str, start: int, stop: int) -> bytes:
        content = self.files.cat_file(f"{self.root}/{name}", start=start, end=stop)
        if len(content) != stop - start:
            raise OSError(f"requested bytes {start} to {stop}, received {len(content)} bytes")
        return bytes(content)

    def _retry(self, name: str, ask: Callable[[], Any], until: float) -> Any:
        """Return the result of `ask`, retried until the time `until` unless the file is missing or access is denied."""

        def count(error: BaseException) -> None:
            with self._counting:
                self.retries += 1
            log.warning("%s/%s: %s: retrying (retry %d of this store)", self.url, name, error, self.retries)

        try:
            return retry(lambda left: ask(), until - time.monotonic(), retryable=_is_retryable, report=count)
        except RetryTimeout as error:
            raise self._explain_failure(name, error.__cause__ or error) from error

    def _explain_failure(self, name: str, error: BaseException) -> UserError:
        if isinstance(error, UserError):
            return error
        if _is_denied(error):
            return UserError(
                f"access to {self.url}/{name} is denied.",
                f"{type(error).__name__}: {error}. Some stores also deny access to files that do not exist.",
                "Set the credentials of the file system, or correct the URL.",
            )
        return UserError(
            f"{self.url}/{name} cannot be fetched.",
            f"{type(error).__name__}: {error}; {self.retries} requests were retried within data.deadline="
            f"{self.deadline:g} s."
            if not isinstance(error, FileNotFoundError)
            else "The file does not exist.",
        )


def _is_denied(error: BaseException) -> bool:
    """Return whether the store denied access, or the driver found no credentials to ask with."""
    anonymous = any(kind.__name__ in _NO_CREDENTIALS for kind in type(error).__mro__)
    return anonymous or isinstance(error, PermissionError) or get_http_status(error) in (401, 403)


def _is_retryable(error: BaseException) -> bool:
    """Return whether to retry a request: all errors except a missing file and denied access may be temporary."""
    return not isinstance(error, FileNotFoundError) and not _is_denied(error)
