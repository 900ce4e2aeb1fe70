"""A field of config.json that is absent or null means what it means to transformers, or is refused by its name."""

from __future__ import annotations

import pytest
from family_cases import CASES
from family_files import Files

NIGHTLY = {
    "qwen2",
    "qwen2-yarn-between-pairs",
    "qwen2-dynamic",
    "olmo2-mha-tied",
    "olmo3",
    "phi3-partial",
    "phi3-longrope-short",
}  # others say it


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in CASES]
)
def test_what_is_absent_or_null_is_what_transformers_has_for_it(name, tmp_path):
    assert Files(name, tmp_path).all_wrong() == {}
