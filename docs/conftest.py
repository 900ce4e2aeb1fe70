"""Lets the tests beside it import what reads and writes the pages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
