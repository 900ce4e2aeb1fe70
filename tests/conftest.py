"""Lets these tests read the pages as the documentation's own tests do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
