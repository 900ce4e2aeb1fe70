"""Retries of calls that failed with a transient error: exponential backoff with jitter, until a deadline.

Exponential Backoff And Jitter, AWS Architecture Blog, 2015. Torch-free.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

FIRST_SECONDS = 0.1  # maximum backoff before the second attempt, in seconds; doubled before each further attempt
LONGEST_SECONDS = 20.0
PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_MAY_PASS = {408, 409, 425, 429}  # retryable HTTP statuses; 409: a concurrent conditional put
# Class names, because the drivers may not be installed; botocore's ConnectionError is not Python's.
_CONNECTION = {"ConnectionError", "HTTPClientError", "IncompleteReadError", "ResponseParserError", "TransportError"}


class RetryTimeout(TimeoutError):
    """Error at the deadline: no call succeeded. `__cause__` is the error of the last call."""


def may_pass(error: BaseException) -> bool:
    """Return whether an error is transient: throttling, a server error (5xx), a timeout, a lost connection."""
    answered = get_http_status(error)
    if answered is not None:
        return answered in _MAY_PASS or (answered >= 500 and answered != 501)
    if isinstance(error, PERMANENT):
        return False
    for cause in _iterate_causes(error):
        if isinstance(cause, (TimeoutError, ConnectionError)):
            return True
        kinds = type(cause).__mro__
        if any(kind.__name__ in _CONNECTION or kind.__module__.startswith("aiohttp.client_exc") for kind in kinds):
            return True
    return False


def retry(
    act: Callable[[float], T],
    seconds: float,
    *,
    retryable: Callable[[BaseException], bool] = may_pass,
    report: Callable[[BaseException], None] = lambda error: None,
) -> T:
    """Return the result of `act(seconds_left)`, called until it succeeds.

    retryable  function (error) -> whether to retry; other errors are raised at once
    report     function called with each error before the next attempt

    Raises RetryTimeout when the next attempt would begin after `seconds`.
    """
    began = time.monotonic()
    pause, tries = FIRST_SECONDS, 0
    while True:
        tries += 1
        try:
            return act(seconds - (time.monotonic() - began))
        except Exception as error:
            if not retryable(error):
                raise
            wait = pause * random.uniform(0.5, 1.0)
            if time.monotonic() - began + wait >= seconds:
                raise RetryTimeout(f"no success within {seconds:g} s ({tries} tries)") from error
            report(error)
            time.sleep(wait)
            pause = min(2 * pause, LONGEST_SECONDS)


def get_http_status(error: BaseException) -> int | None:
    """Return the HTTP status in an error of botocore, aiohttp or gcsfs, or in its causes; None without a status."""
    for cause in _iterate_causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and "ResponseMetadata" in response:
            return int(response["ResponseMetadata"].get("HTTPStatusCode", 0)) or None
        for name in ("status", "code"):
            value = getattr(cause, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
    return None


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
