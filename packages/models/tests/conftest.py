"""Lets the tests of this package share code: modules beside them are importable, here and in the ranks of a pool."""

from __future__ import annotations

import sys
from pathlib import Path

from gangline_testkit.fixtures import random_batch, runs

sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["random_batch", "runs"]
