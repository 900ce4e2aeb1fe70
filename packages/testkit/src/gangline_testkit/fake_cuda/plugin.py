"""Pytest plugin that loads the fake device before any test file: `pytest -p gangline_testkit.fake_cuda.plugin`."""

from __future__ import annotations

from gangline_testkit.fake_cuda.load import load

LIBRARY = load()

from gangline_testkit.fake_cuda import kernels, runtime, triton  # noqa: E402

runtime.install(LIBRARY)
kernels.install()
triton.install()
