"""Triton kernels of the loss: tests under the interpreter, device selection, fallback without a compiler."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gangline_basics.model import kernels
from gangline_testkit.interpreted import run_interpreted


def test_loss_kernels_pass_interpreted_tests():
    run_interpreted(Path(__file__).with_name("interpreted_loss.py"))


class NoCompiler:
    """Triton driver on a machine without a C compiler."""

    @property
    def active(self):
        raise RuntimeError("Failed to find C compiler.")


@pytest.fixture
def driver(monkeypatch):
    """Function that replaces Triton's driver, which at first launches; caches are cleared before and after the test."""
    runtime = pytest.importorskip("triton.runtime")
    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=object())))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernels._launches.cache_clear()
    yield partial(monkeypatch.setattr, runtime, "driver")
    kernels._launches.cache_clear()


def on_gpu(index: int) -> SimpleNamespace:
    return SimpleNamespace(dtype=torch.bfloat16, is_cuda=True, device=torch.device("cuda", index))


def test_kernels_run_only_on_current_gpu(driver):
    assert kernels.takes_kernels(on_gpu(0))
    assert not kernels.takes_kernels(on_gpu(1)), "Triton would launch on GPU 0 with addresses of GPU 1"


def test_kernels_without_compiler_fall_back_with_warning(driver):
    driver(NoCompiler())
    with pytest.warns(UserWarning, match="Failed to find C compiler.*plain operators.*Install gcc"):
        assert not kernels.takes_kernels(on_gpu(0))
    assert not kernels.takes_kernels(on_gpu(0)), "with one warning"


def test_interpreted_tests_are_skipped_only_outside_linux(monkeypatch):
    """Check that a failure on Linux, where the tests depend on Triton, is not turned into a skip."""
    with pytest.raises(AssertionError):
        run_interpreted(Path("none.py"))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(pytest.skip.Exception, match="supports only Linux"):
        run_interpreted(Path("none.py"))
