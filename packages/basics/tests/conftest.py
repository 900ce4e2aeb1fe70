"""Fixtures shared by the tests of gangline-basics."""

import sys
from pathlib import Path

from gangline_testkit.fixtures import core_alone, random_batch, runs, strangers

sys.path.insert(0, str(Path(__file__).parent))  # for `report_pages`

__all__ = ["core_alone", "random_batch", "runs", "strangers"]
