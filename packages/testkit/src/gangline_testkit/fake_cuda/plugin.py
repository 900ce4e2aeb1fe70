"""Pytest plugin that loads the fake device before any test file: `pytest -p gangline_testkit.fake_cuda.plugin`."""

from __future__ import annotations

import pytest

from gangline_testkit.fake_cuda.load import load


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Load the device, before a conftest.py imports torch. Raises RuntimeError if torch is already imported."""
    library = load()
    from gangline_testkit.fake_cuda import kernels, runtime, triton

    runtime.install(library)
    kernels.install()
    triton.install()
