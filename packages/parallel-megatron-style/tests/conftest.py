"""Import path for the shared modules of these tests, in the test process and in the ranks of the pool."""

from __future__ import annotations

import sys
from pathlib import Path

from gangline_testkit.pool import PRELOAD

sys.path.insert(0, str(Path(__file__).parent))
PRELOAD.append("gangline_parallel_megatron_style.build")  # import once in the fork server, not in about thirty ranks
PRELOAD.append("gangline_testkit.strategy_ranks")
