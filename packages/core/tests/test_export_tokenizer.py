"""`gangline export` writes what text needs beside the weights."""

from __future__ import annotations

import json

import pytest

from gangline.errors import UserError
from gangline.interop.tokenizer_files import tokenizer_files


@pytest.fixture
def tokenizer(tmp_path):
    content = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 7, "content": "<|end|>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "bos_token": "no"})
    )
    (tmp_path / "notes.txt").write_text("not of the tokenizer")
    return str(tmp_path / "tokenizer.json")


def test_the_files_of_a_tokenizer_and_its_end_go_beside_the_weights(tokenizer, tmp_path):
    found = tokenizer_files(tokenizer, None)
    assert set(found) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert json.loads(found["generation_config.json"]) == {"eos_token_id": 7}
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert tokenizer_files(tokenizer, None, str(tmp_path / "mine.jinja"))["chat_template.jinja"] == b"{{ messages }}"


def test_the_generation_config_of_the_base_goes_on(tokenizer, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert json.loads(tokenizer_files(tokenizer, str(base))["generation_config.json"]) == {"eos_token_id": [3, 4, 7]}
    assert set(tokenizer_files(None, str(base))) == {"generation_config.json"}


def test_a_tokenizer_that_is_gone_is_told(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        tokenizer_files(str(tmp_path / "nowhere.json"), None)
