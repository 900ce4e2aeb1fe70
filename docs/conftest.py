"""Make the modules that read and write the documentation pages importable for the tests in this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
