"""Asking a remote store again: exponential back-off with a deadline (exponential back-off and jitter, AWS Architecture
Blog, 2015)."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.stores.base import StoreError

T = TypeVar("T")

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 20.0
_MAY_PASS = {408, 409, 425, 429}  # 409: another conditional put is under way at this moment
_CANNOT_PASS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
# By name, for the drivers that have them may not be installed; botocore's ConnectionError is not Python's.
_CONNECTION = {"ConnectionError", "HTTPClientError", "IncompleteReadError", "ResponseParserError", "TransportError"}


def retry(act: Callable[[float], T], where: str, deadline_seconds: float) -> T:
    """What `act(seconds_left)` returns, called until it does not fail in a way that may pass.

    What cannot pass is raised as an OSError that begins with `where`; so is, as StoreError, that the time is over.
    """
    began = time.monotonic()
    pause, tries = _FIRST_SECONDS, 0
    while True:
        tries += 1
        try:
            return act(deadline_seconds - (time.monotonic() - began))
        except Exception as error:
            if not may_pass(error):
                raise named(error, where) from error
            wait = pause * random.uniform(0.5, 1.0)
            if time.monotonic() - began + wait >= deadline_seconds:
                tried = f"no success within {deadline_seconds:g} s ({tries} tries)"
                last = f"{where}: {tried}; the last: {describe_error(error)}"
                raise StoreError(errno.ETIMEDOUT, last) from error
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_SECONDS)


def may_pass(error: BaseException) -> bool:
    """Throttling, the server's own failures (5xx), timeouts and lost connections."""
    answered = status(error)
    if answered is not None:
        return answered in _MAY_PASS or (answered >= 500 and answered != 501)
    if isinstance(error, _CANNOT_PASS):
        return False
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    for cause in _causes(error):
        if isinstance(cause, (TimeoutError, ConnectionError)):
            return True
        kinds = type(cause).__mro__
        if any(kind.__name__ in _CONNECTION or kind.__module__.startswith("aiohttp.client_exc") for kind in kinds):
            return True
    return False


def status(error: BaseException) -> int | None:
    """The HTTP status that the store answered with, if it did: botocore, aiohttp and gcsfs each put it elsewhere."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and "ResponseMetadata" in response:
            return int(response["ResponseMetadata"].get("HTTPStatusCode", 0)) or None
        for name in ("status", "code"):
            value = getattr(cause, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
    return None


def named(error: BaseException, where: str) -> OSError | EOFError:
    """The same error, as the kind of `_CANNOT_PASS`, EOFError or else StoreError that it is, with its place."""
    kinds: tuple[type[OSError] | type[EOFError], ...] = (*_CANNOT_PASS, EOFError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), StoreError)
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    return kind(number, f"{where}: {describe_error(error)}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
