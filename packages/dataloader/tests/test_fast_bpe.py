"""tiktoken as a faster codec: tokens equal those of tokenizers, and unsupported tokenizers fall back."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from gangline.errors import UserError
from gangline_basics.data.codec import TokenizerCodec
from gangline_dataloader.commands import tokenizer as train_one
from gangline_dataloader.prepare import fast_bpe
from gangline_dataloader.prepare.inputs import list_inputs
from gangline_dataloader.prepare.settings import TIKTOKEN, TOKENIZERS, Settings

# Split pattern of Llama 3.
LLAMA3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
ODD = [
    "", " ", "\n\n\n  \t", "don't we'll I'D", "１２３ ½ ٣", "naïve café e\u0301",
    "日本語のテキスト 🇩🇪👩‍👩‍👧", "\x00\x7f\u200b\ufeff",
    "a" * 5000, " " * 3000, "def f(x):\n\treturn  x  \n", "x<|endoftext|>y", "\r\n\r\n", "\U0010ffff",
]  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return real files and unusual texts."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(errors="replace") for path in sorted(library.glob("*.py"))[:120]] + ODD


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    library = Path(sysconfig.get_paths()["stdlib"])
    train_one.train(list_inputs([str(library / "a*.py")]), "text", 3000, folder / "tokenizer.json")
    return folder / "tokenizer.json"


def changed(path: Path, where: Path, **values: object) -> Path:
    """Write the tokenizer with other top-level entries to `where`."""
    where.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return where


def test_tiktoken_equals_tokenizers_for_every_document(trained, texts):
    slow = TokenizerCodec(str(trained), None, "replace")
    quick = Settings(tokenizer=str(trained)).open_codec(TIKTOKEN)
    assert isinstance(quick, fast_bpe.FastBpe)
    for text in texts:
        expected, found = (codec.encode_file(text.encode(), "it") for codec in (slow, quick))
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected), text[:80]


def test_custom_split_pattern_is_supported_by_tiktoken(trained, texts, tmp_path):
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
    path = changed(trained, tmp_path / "l.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})
    slow = TokenizerCodec(str(path), None, "replace")
    quick = fast_bpe.build_fast_bpe(slow)
    assert quick is not None
    for text in texts:
        assert np.array_equal(quick.encode_file(text.encode(), "it"), slow.encode_file(text.encode(), "it")), text[:80]


def test_unsupported_tokenizer_falls_back_to_tokenizers(trained, tmp_path):
    model = json.loads(trained.read_text())["model"]
    twice = {**model, "merges": [*model["merges"], model["merges"][-1]]}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    for number, values in enumerate([{"normalizer": {"type": "NFC"}}, {"pre_tokenizer": level}, {"model": twice}]):
        path = changed(trained, tmp_path / f"{number}.json", **values)
        assert fast_bpe.build_fast_bpe(TokenizerCodec(str(path), None, "replace")) is None
    assert isinstance(Settings(tokenizer=str(trained)).open_codec(TOKENIZERS), TokenizerCodec)


@pytest.mark.parametrize("ignored", [False, True])
def test_unmergeable_word_matches_tokenizers(trained, tmp_path, ignored):
    model = json.loads(trained.read_text())["model"]
    vocabulary = {**model["vocab"], "Ġgangline": len(model["vocab"])}
    path = changed(trained, tmp_path / "w.json", model={**model, "ignore_merges": ignored, "vocab": vocabulary})
    codec = Settings(tokenizer=str(path)).open_codec(TIKTOKEN)
    assert isinstance(codec, fast_bpe.FastBpe) is not ignored  # merges do not look words up in the vocabulary
    expected = Tokenizer.from_file(str(path)).encode("a gangline", add_special_tokens=False).ids
    assert codec.encode_file(b"a gangline", "it").tolist() == expected
    assert (vocabulary["Ġgangline"] in expected) is ignored


def test_ignore_merges_with_complete_vocabulary_uses_tiktoken(trained, tmp_path):
    model = json.loads(trained.read_text())["model"]
    path = changed(trained, tmp_path / "w.json", model={**model, "ignore_merges": True})
    assert isinstance(Settings(tokenizer=str(path)).open_codec(TIKTOKEN), fast_bpe.FastBpe)


def test_saved_dropout_is_disabled_in_both_codecs(trained, tmp_path):
    model = json.loads(trained.read_text())["model"]
    path = changed(trained, tmp_path / "d.json", model={**model, "dropout": 0.5})
    text = b"def function(self): return something\n" * 20
    expected = TokenizerCodec(str(trained), None, "replace").encode_file(text, "it")
    for way, kind in ((TIKTOKEN, fast_bpe.FastBpe), (TOKENIZERS, TokenizerCodec)):
        codec = Settings(tokenizer=str(path)).open_codec(way)
        assert isinstance(codec, kind)
        assert np.array_equal(codec.encode_file(text, "it"), expected)


def test_tiktoken_mismatch_raises_user_error(trained, monkeypatch):
    quick = Settings(tokenizer=str(trained)).open_codec(TIKTOKEN)
    monkeypatch.setattr(fast_bpe, "SAMPLED", 1)
    quick.encode_file(b"def f(): pass", "same.py")
    quick.ids = quick.ids[::-1].copy()
    with pytest.raises(
        UserError,
        match=r"tiktoken and tokenizers encode other\.py to different tokens.*\n.*\n.*--tokenise-with tokenizers",
    ):
        quick.encode_file(b"def f(): pass", "other.py")
