"""Retried calls: retryable errors, pauses, deadline."""

from __future__ import annotations

import pytest

from gangline.storage import retry as retrying
from gangline.storage.retry import RetryTimeout, may_pass, retry


class Answered(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class HTTPClientError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (Answered(503), True),
        (Answered(500), True),
        (Answered(429), True),
        (Answered(501), False),
        (Answered(403), False),
        (Answered(404), False),
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (HTTPClientError(), True),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (ValueError(), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_error_with_transient_cause_is_transient(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
    wrapped = OSError(5, "wrapped by the driver")
    wrapped.__cause__ = error
    if not isinstance(error, OSError) or passes:
        assert may_pass(wrapped) is passes


def test_retry_pauses_longer_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(retrying.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(retrying.time, "sleep", sleep)
    monkeypatch.setattr(retrying.random, "uniform", lambda low, high: high)
    left: list[float] = []

    def act(seconds: float) -> None:
        left.append(seconds)
        raise ConnectionResetError("gone")

    errors: list[BaseException] = []
    with pytest.raises(RetryTimeout, match=r"no success within 100 s \(12 tries\)") as caught:
        retry(act, 100, report=errors.append)
    assert str(caught.value.__cause__) == "gone"
    assert len(errors) == len(pauses) == 11
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert max(pauses) == 20
    assert sum(pauses) < 100
    assert left[0] == 100
    assert left == sorted(left, reverse=True)


def test_retry_raises_a_permanent_error_at_once() -> None:
    tries: list[float] = []

    def act(seconds: float) -> None:
        tries.append(seconds)
        raise FileNotFoundError("none")

    with pytest.raises(FileNotFoundError):
        retry(act, 100)
    assert len(tries) == 1


def test_retry_uses_retryable_function_of_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "FIRST_SECONDS", 0.001)
    errors = [ValueError("odd"), KeyError("odd")]

    def act(seconds: float) -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert retry(act, 100, retryable=lambda error: True) == "done"
