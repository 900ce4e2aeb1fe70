"""Make modules of other test folders importable, and share the fixture `curves`."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "docs")]
sys.path.append(str(ROOT / "packages/models/tests"))  # small models of each family
sys.path.append(str(ROOT / "packages/parallel-megatron-style/tests"))  # functions that ranks run and that write files
sys.path.append(str(ROOT / "benchmarks"))  # module for published measurements


@pytest.fixture(scope="session")
def curves(tmp_path_factory):
    """Run small training runs on any layout; the reference run of one process is trained once."""
    from curves import Curves

    with Curves(tmp_path_factory.mktemp("curves")) as made:
        yield made
