"""Absent or null fields of config.json in every family: the default of transformers, or a refusal by field name."""

from __future__ import annotations

from family_cases import CASES
from family_suite import AbsentFields


class TestAbsentFields(AbsentFields):
    cases = tuple(CASES)
    nightly = frozenset(  # by default, the other families cover these fields
        {
            "qwen2",
            "qwen2-yarn-between-pairs",
            "qwen2-dynamic",
            "olmo2-mha-tied",
            "olmo3",
            "phi3-partial",
            "phi3-longrope-short",
        }
    )
