"""Import path for the shared modules of these tests, in the test process and in the ranks of the pool."""

from __future__ import annotations

import sys
from pathlib import Path

from gangline_testkit.fixtures import random_batch, runs

sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["random_batch", "runs"]
