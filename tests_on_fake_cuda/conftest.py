"""Make `layouts` importable. The tests need `-p gangline_testkit.fake_cuda.plugin`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
