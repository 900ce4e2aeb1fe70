"""Import path for the shared modules of these tests, in the test process and in the ranks of the pool."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
