"""Retries of requests to a remote store. Every error names the URL."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from gangline.storage.retry import PERMANENT, RetryTimeout, retry
from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.stores.base import StoreError

T = TypeVar("T")


def retry_request(act: Callable[[float], T], where: str, deadline_seconds: float) -> T:
    """Return the result of `act(seconds_left)`, retried until the deadline.

    Raises StoreError past the deadline. A permanent error keeps its type if the type is in `PERMANENT` (such as
    FileNotFoundError) or is EOFError; any other permanent error becomes a StoreError. The message begins with `where`.
    """
    try:
        return retry(act, deadline_seconds)
    except RetryTimeout as error:
        last = error.__cause__ or error
        raise StoreError(errno.ETIMEDOUT, f"{where}: {error}; last error: {describe_error(last)}") from last
    except Exception as error:
        kind = next((kind for kind in (*PERMANENT, EOFError) if isinstance(error, kind)), StoreError)
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        raise kind(number, f"{where}: {describe_error(error)}") from error
