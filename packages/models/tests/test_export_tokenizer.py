"""`gangline export`: tokenizer files, chat template and generation config next to the weights."""

from __future__ import annotations

import json
import shutil

import pytest

from gangline.errors import UserError
from gangline_basics.data.chat import read_template
from gangline_basics.data.tokenizer_files import read_tokenizer_files
from gangline_models.hugging_face.commands import export_run
from gangline_testkit.sessions import train_session


@pytest.fixture
def tokenizer(tmp_path):
    content = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 7, "content": "<|end|>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "bos_token": "no"})
    )
    (tmp_path / "notes.txt").write_text("not of the tokenizer")
    return str(tmp_path / "tokenizer.json")


def test_export_includes_tokenizer_files_and_eos_token(tokenizer, tmp_path):
    found = read_tokenizer_files(tokenizer, None)
    assert set(found) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert json.loads(found["generation_config.json"]) == {"eos_token_id": 7}
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert (
        read_tokenizer_files(tokenizer, None, str(tmp_path / "mine.jinja"))["chat_template.jinja"] == b"{{ messages }}"
    )


def test_eos_token_is_read_from_special_tokens_map(tokenizer, tmp_path):
    """Check that the map precedes the config, unless the config lists its added tokens, as in transformers."""
    config = tmp_path / "tokenizer_config.json"

    def named() -> dict:
        return json.loads(read_tokenizer_files(tokenizer, None).get("generation_config.json", b"{}"))

    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "a", "eos_token": "a"}))
    assert named() == {"bos_token_id": 0, "eos_token_id": 0}
    config.write_text(json.dumps({"eos_token": "<|end|>", "added_tokens_decoder": {}}))
    assert named() == {"eos_token_id": 7}
    config.unlink()
    assert named() == {"bos_token_id": 0, "eos_token_id": 0}
    (tmp_path / "special_tokens_map.json").unlink()
    assert named() == {}


def test_link_out_of_the_tokenizer_directory_is_refused(tokenizer, tmp_path_factory, tmp_path):
    secret = tmp_path_factory.mktemp("private") / "id_rsa"
    secret.write_text("a key")
    for name in ("vocab.json", "tokenizer_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(secret)
        with pytest.raises(UserError, match=rf"{name} is a symbolic link to a file outside of its") as refused:
            read_tokenizer_files(tokenizer, None)
        assert str(secret) in str(refused.value)
        (tmp_path / name).unlink()
    base = tmp_path / "base"
    base.mkdir()
    (base / "generation_config.json").symlink_to(secret)
    with pytest.raises(UserError, match="symbolic link"):
        read_tokenizer_files(None, str(base))
    (tmp_path / "merges.txt").symlink_to(tmp_path / "notes.txt")
    assert read_tokenizer_files(tokenizer, None)["merges.txt"] == b"not of the tokenizer"
    (tmp_path / "vocab.json").mkdir()
    with pytest.raises(UserError, match="not a regular file"):
        read_tokenizer_files(tokenizer, None)


def test_links_of_the_hugging_face_cache_are_followed(tokenizer, tmp_path_factory, tmp_path):
    """Create links as huggingface_hub does, from snapshots/REVISION/FILE to ../../blobs/HASH."""
    hub = tmp_path_factory.mktemp("hub")
    repository = hub / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "0a1b", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / name, blobs / name[::-1])
        (snapshot / name).symlink_to(f"../../blobs/{name[::-1]}")
    found = read_tokenizer_files(str(snapshot / "tokenizer.json"), None)
    assert set(found) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    (tmp_path / "link").symlink_to(snapshot)
    assert read_tokenizer_files(str(tmp_path / "link" / "tokenizer.json"), None) == found
    other = hub / "models--owner--other" / "secret"
    other.parent.mkdir()
    other.write_text("a key")
    (snapshot / "vocab.json").symlink_to("../../../models--owner--other/secret")
    with pytest.raises(UserError, match="symbolic link"):
        read_tokenizer_files(str(snapshot / "tokenizer.json"), None)


def test_export_keeps_generation_config_of_base_model(tokenizer, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert json.loads(read_tokenizer_files(tokenizer, str(base))["generation_config.json"]) == {
        "eos_token_id": [3, 4, 7]
    }
    assert set(read_tokenizer_files(None, str(base))) == {"generation_config.json"}


def test_generation_config_falls_back_to_config_json_eos(tokenizer, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"eos_token_id": 2, "pad_token_id": null, "hidden_size": 8}')
    found = json.loads(read_tokenizer_files(None, str(tmp_path / "base"))["generation_config.json"])
    assert found == {"eos_token_id": 2}


def test_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_tokenizer_files(str(tmp_path / "nowhere.json"), None)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
)
def test_tokenizer_file_without_json_object_is_refused(tokenizer, tmp_path, name):
    (tmp_path / name).write_text("[1]")
    with pytest.raises(UserError, match=r"has an unexpected structure|must contain a JSON object"):
        read_tokenizer_files(tokenizer, str(tmp_path))


def test_weights_are_exported_when_the_tokenizer_is_gone(tmp_path, capsys):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    place = tmp_path / "words"
    place.mkdir()
    words = Tokenizer(WordLevel({"the": 0, "dogs": 1, "pull": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(place / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("the dogs pull\n" * 2000)
    data = (f"data.path={tmp_path / 'text.txt'}", f"data.tokenizer={place / 'tokenizer.json'}", "data.separator='?'")
    assert train_session(tmp_path / "run", "data=text", *data, "run.steps=2", "validate.every=null") == 0
    capsys.readouterr()
    assert export_run([str(tmp_path / "run"), str(tmp_path / "whole")]) == 0
    assert (tmp_path / "whole" / "tokenizer.json").exists()
    assert capsys.readouterr().err == ""
    shutil.rmtree(place)
    assert export_run([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    told = capsys.readouterr().err
    assert str(place / "tokenizer.json") in told
    assert "the export has no tokenizer: " in told
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_damaged_tokenizer_config_refuses_chat_template(tokenizer, tmp_path):
    config = tmp_path / "tokenizer_config.json"
    config.write_text("[1]")
    with pytest.raises(UserError, match=r"tokenizer_config\.json cannot be read"):
        read_template(tokenizer)
    config.write_text('{"bos_token": {"lstrip": false}, "chat_template": "x"}')
    assert read_template(tokenizer).special == {}
