"""Retries of tests that wait (root `conftest.py`): timing failures are retried, wrong results never."""

from __future__ import annotations

import importlib.util
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gangline_testkit import compare

LOSS = 5.545177459716797


def _rule():
    spec = importlib.util.spec_from_file_location("tried_again", Path(__file__).parents[1] / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.may_have_waited


def number() -> None:
    found = LOSS * (1 + 1e-9)
    assert found == pytest.approx(LOSS, rel=1e-12)


def numbers() -> None:
    found = [LOSS]
    assert found == pytest.approx([LOSS + 1])


def of_one_name() -> None:
    found = {"loss": 1.0}
    assert found == pytest.approx({"loss": 2.0})


def curve() -> None:
    assert [(1, LOSS, 0.25), (2, 5.5, 0.25)] == [(1, LOSS, 0.25), (2, 5.0, 0.25)]


def message() -> None:
    assert math.nextafter(LOSS, 9) == LOSS, "step 3"


def close() -> None:
    assert math.isclose(LOSS, 5.5, rel_tol=1e-6)


def tensors() -> None:
    torch.testing.assert_close(torch.ones(3), torch.zeros(3))


def bits() -> None:
    assert torch.equal(torch.ones(3), torch.zeros(3))


def arrays() -> None:
    np.testing.assert_allclose(np.ones(3), np.zeros(3))


def of_the_kit() -> None:
    compare.close("loss", torch.ones(3), torch.full((3,), 2.0), 1e-6)


def bits_of_the_kit() -> None:
    compare.compare_all("gradients", {"w": torch.ones(3)}, {"w": torch.zeros(3)}, 0)


def number_of_the_kit() -> None:
    compare.assert_number_close("loss of step 3", 5.12, -5e-22, 1e-6)


def of_a_rank() -> None:
    raise RuntimeError("on rank 1 of 2:\nAssertionError: Tensor-likes are not close!\n\nMismatched elements: 1 / 4")


def late() -> None:
    raise subprocess.TimeoutExpired(["train"], 240)


def vain() -> None:
    assert not LOSS, "waited in vain"


def slow() -> None:
    began, now = 1.123456789, 31.123456789
    assert now - began < 25


def code() -> None:
    printed = f"step 3 loss {LOSS}\ntrain: rank 1 failed first: it was killed by SIGKILL"
    assert len(printed) == 0, printed


def starts() -> None:
    assert [2, 1, 2] == [1, 2]


@pytest.mark.parametrize(
    "test",
    [number, numbers, of_one_name, curve, message, close, tensors, bits, arrays]
    + [of_the_kit, bits_of_the_kit, number_of_the_kit, of_a_rank],
)
def test_wrong_result_is_not_retried(test):
    with pytest.raises((AssertionError, RuntimeError)) as failed:
        test()
    assert not _rule()(failed.value), failed.value


@pytest.mark.parametrize("test", [late, vain, slow, code, starts])
def test_timing_failure_of_loaded_machine_is_retried(test):
    with pytest.raises((AssertionError, subprocess.TimeoutExpired)) as failed:
        test()
    assert _rule()(failed.value), failed.value


USED_UP = """
import threading  # its tests wait

import pytest

tries = []

@pytest.fixture(scope="session")
def places():
    yield (made := [])
    print("the session's ended with", *made)

@pytest.fixture(scope="module")
def run(places):
    assert "run" not in places, "there is one by this name"
    places.append("run")
    yield (alive := ["run"])
    print("the file's ended with", *alive)

def test_ends_it(run):
    tries.append(run.pop())
    assert len(tries) == 2, "waited in vain"

def test_finds_what_the_second_try_left(run):
    assert run == []
"""


def test_retry_starts_with_fresh_fixtures(tmp_path):
    pytest.importorskip("pytest_rerunfailures")
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_used_up.py").write_text(USED_UP)
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "--rootdir", ".", "test_used_up.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300).stdout
    assert "2 passed, 1 rerun" in said, said
    assert said.count("the file's ended") == said.count("the session's ended with run") == 2, said
