"""Unusual values of config.json fields: the meaning of transformers, or a refusal with a message."""

from __future__ import annotations

import json
from math import nan

import pytest
from family_cases import CASES, CORE, theirs
from family_suite import OddFields

from gangline import UserError
from gangline.config import PositiveInt, ShareBelowOne
from gangline_models.hugging_face.commands import list_overrides
from gangline_models.hugging_face.fields import check_value


class TestOddFields(OddFields):
    cases = (*CASES, *CORE)
    sample = "gemma2"
    fields = (
        ("sliding_window", 0),
        ("attn_logit_softcapping", 0.0),
        ("num_hidden_layers", 10**9),
        ("num_key_value_heads", "2"),
        ("rope_parameters", {}),
        ("layer_types", []),
        ("hidden_size", -1),
        ("vocab_size", 2**62),
        ("rms_norm_eps", None),
    )


@pytest.mark.parametrize(
    ("family", "name", "value", "allowed"),
    [
        ("granite", "attention_multiplier", 0.0, "more than 0"),
        ("granite", "logits_scaling", 0, "more than 0"),
        ("qwen2", "sliding_window", -1, "at least 1"),
        ("gpt2", "n_layer", 10**9, "tensors"),
        ("phi3-partial", "partial_rotary_factor", 1.5, "at most 1"),
        ("deepseek-v3-dense", "num_nextn_predict_layers", 10**9, "tensors"),
        ("qwen3-next-dense", "full_attention_interval", 0, "at least 1"),
    ],
)
def test_refusal_names_field_value_and_range(family, name, value, allowed, tmp_path):
    theirs(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    inner = content["rope_parameters"] if name in content.get("rope_parameters", ()) else content
    inner[name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as refused:
        list_overrides(tmp_path)
    assert f"{name}={value}" in str(refused.value)
    assert allowed in str(refused.value)


@pytest.mark.parametrize(
    ("hint", "value", "complaint"),
    [
        (PositiveInt, 1, None),
        (PositiveInt, 0, "must be at least 1"),
        (PositiveInt, True, "must be an integer, at least 1"),
        (PositiveInt, 1.0, "must be an integer, at least 1"),
        (PositiveInt, 2**63, "must be less than 2^63"),
        (PositiveInt | None, None, None),
        (PositiveInt | None, "1", "must be an integer or null, at least 1"),
        (ShareBelowOne, 0, None),
        (ShareBelowOne, nan, "must be finite and at least 0 and less than 1"),
        (float, 10**400, "must be less than 2^63"),
        (bool, 1, "must be true or false"),
        (list[str], ["a"], None),
        (list[str], ["a", 1], "must be a list of text"),
        (list[PositiveInt], [1, 0], "must each be at least 1"),
        (list[float], [10**400], "must be less than 2^63"),
        (dict, {"a": 10**400, "b": nan}, None),
        (dict | None, [], "must be a mapping or null"),
    ],
)
def test_field_value_is_checked_for_type_and_range(hint, value, complaint):
    if complaint is None:
        assert check_value("size", value, hint) is value
        return
    with pytest.raises(UserError) as caught:
        check_value("size", value, hint)
    assert caught.value.details == (f"size of config.json {complaint}.",)
