"""Lets the tests of this package share code: modules beside them are importable, here and in the ranks of a pool."""

from __future__ import annotations

import sys
from pathlib import Path

from gangline_testkit.pool import PRELOAD

sys.path.insert(0, str(Path(__file__).parent))
PRELOAD.append("gangline_parallel_megatron_style.build")  # once in the fork server, not in each of some thirty ranks
PRELOAD.append("gangline_testkit.strategy_ranks")
