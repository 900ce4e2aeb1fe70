"""`--end-of-text`: end token chosen from the tokenizer, and messages for tokenizers without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from gangline.errors import UserError
from gangline_basics.data.codec import open_codec
from gangline_basics.data.config import TextConfig
from gangline_dataloader import commands
from gangline_dataloader.store.fields import add_checksum
from gangline_dataloader.store.manifest import read
from gangline_testkit.runs import build_small_run

DEEP = "<｜end▁of▁sentence｜>"


def tokenizer(folder: Path, *special: str, eos: object = None) -> str:
    """Save a tokenizer of letters and the given special tokens, which begin at number 256."""
    model = models.BPE({letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(list(special))
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return str(folder / "tokenizer.json")


ENDS = {
    "its config": ((DEEP,), DEEP, 256),
    "its config, as an object": ((DEEP,), {"content": DEEP}, 256),
    "its config before usual names": (("</s>", "<|end|>"), "<|end|>", 257),
    "not its config's end of an answer": (("<|im_end|>", "<|endoftext|>"), "<|im_end|>", 257),
    "a usual name": (("<|end|>", "</s>"), None, 257),
    "a usual name, as the config's is no token": (("<|end|>", "</s>"), "<eos>", 257),
    "none": ((DEEP,), None, None),
}


@pytest.mark.parametrize("case", ENDS)
def test_end_of_text_is_chosen_from_tokenizer(case, texts, make_store, tmp_path):
    special, eos, end = ENDS[case]
    path = tokenizer(tmp_path / "vocabulary", *special, eos=eos)
    assert open_codec(path, None).separator == end
    store = make_store(texts, tokenizer=path)
    assert read(store).tokenizer.end_of_text == end


def test_tokenizer_without_an_end_of_text_is_reported(texts, tmp_path, capsys):
    path, out = tokenizer(tmp_path / "vocabulary", DEEP), tmp_path / "out"
    words = ["prepare", str(texts), "--tokenizer", path, "--workers", "1", "--out"]
    assert commands.main([*words, str(out)]) == 0
    assert (
        "no end-of-text token: documents follow each other without separator; see --end-of-text TOKEN"
        in capsys.readouterr().out
    )
    assert commands.main(["show", str(out)]) == 0
    assert "end of text: none" in capsys.readouterr().out
    run = build_small_run("data=tokens", f"data.path={out}")
    (notice,) = run.data.list_notices(run)
    assert f"{out} has no end-of-text token" in notice
    (notice,) = TextConfig(tokenizer=path).list_notices(run)
    assert "data.separator=TOKEN" in notice
    assert commands.main([*words, str(tmp_path / "named"), "--end-of-text", DEEP]) == 0
    assert "no end of text" not in capsys.readouterr().out
    run = build_small_run("data=tokens", f"data.path={tmp_path / 'named'}")
    assert run.data.list_notices(run) == TextConfig(tokenizer=path, separator=DEEP).list_notices(run) == []


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--tokenizer", "nosuch.json"], "--tokenizer nosuch.json cannot be read."),
        (["--tokenizer", "{texts}/file-00.txt"], "--tokenizer {texts}/file-00.txt is not a tokenizer.json."),
        (["--end-of-text", "<|nope|>"], "--end-of-text <|nope|> must be one byte."),
        (["--end-of-text", ""], "--end-of-text  must be one byte."),
        (["--tokenizer", "{path}", "--end-of-text", "<|nope|>"], "--end-of-text <|nope|> is not a token of {path}."),
    ],
)
def test_invalid_tokenizer_error_names_prepare_option(words, what, texts, tmp_path):
    places = {"texts": texts, "path": tokenizer(tmp_path / "vocabulary", DEEP)}
    with pytest.raises(UserError) as error:
        commands.main(
            ["prepare", str(texts), "--out", str(tmp_path / "out"), *(word.format(**places) for word in words)]
        )
    assert error.value.what == what.format(**places)
    assert "data." not in str(error.value)


def test_untokenizable_text_error_names_prepare_option(texts, make_store, tmp_path):
    made = Tokenizer(models.WordLevel({"word": 0}, "<absent>"))
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"^--tokenizer \S+ cannot encode"):
        make_store(texts, tokenizer=str(tmp_path / "tokenizer.json"))


def test_store_with_empty_end_of_text_accepts_append(texts, make_store, tmp_path):
    """Append to a store of an older version, in which an empty end of text meant byte 0."""
    store = make_store(texts)
    document = json.loads((store / "manifest.json").read_text())
    document.pop("checksum")
    document["report"]["settings"]["end_of_text"] = ""
    (store / "manifest.json").write_text(json.dumps(add_checksum(document)))
    (tmp_path / "more.txt").write_text("more")
    words = ["prepare", str(tmp_path / "more.txt"), "--out", str(store), "--append", "--validation", "0"]
    assert commands.main([*words, "--workers", "1"]) == 0
