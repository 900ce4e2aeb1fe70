"""Lets these tests read the pages as the tests of the documentation do, and share the run that others go by."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "docs")]
sys.path.append(str(ROOT / "packages/models/tests"))  # small models of families
sys.path.append(str(ROOT / "packages/parallel-megatron-style/tests"))  # what ranks do that write
sys.path.append(str(ROOT / "benchmarks"))  # published measurements


@pytest.fixture(scope="session")
def curves(tmp_path_factory):
    """Small runs on any layout; what one process draws is trained once."""
    from curves import Curves

    with Curves(tmp_path_factory.mktemp("curves")) as made:
        yield made
