"""Published model shapes composed on the command line: class defaults, and nested groups such as `model/rope`."""

from __future__ import annotations

import pytest

from gangline.config.compose import compose_one
from gangline.config.serial import from_dict, to_dict
from gangline_models.parts import MODELS
from gangline_models.rope.base import PlainRope


@pytest.mark.parametrize("part", MODELS, ids=lambda part: part.name)
def test_omitted_options_use_class_defaults(part):
    run = compose_one([f"model={part.name}"])
    assert run.model == part.config()
    assert from_dict({**to_dict(run), "model": {}}).model == part.config()


def test_rope_choice_replaces_preset_rope():
    """Check that a new YaRN factor keeps the other values of the preset, such as 4096 original positions."""
    rope = compose_one(["model=gpt-oss-20b", "model.rope.factor=8"]).model.rope
    assert (rope.factor, rope.original_max_position, rope.truncate) == (8.0, 4096, False)
    assert compose_one(["model=gpt-oss-20b", "model/rope=plain"]).model.rope == PlainRope()
