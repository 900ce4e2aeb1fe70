"""Tokenizing a long text in pieces gives the tokens of the complete text."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers as pre, trainers

from gangline_basics.data import pieces
from gangline_basics.data.codec import TokenizerCodec

CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n/]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
FROM_THE_RIGHT = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))|[^\r\n\p{L}\p{N}]?\p{L}+|\s?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
)
RNG = np.random.default_rng(0)
WORDS = [
    "the",
    "naïve",
    "  ",
    "\n\n\n",
    "\n",
    " ",
    "漢字",
    "1234567",
    "para",
    "e\u0301",
    ".\n/path",
    "<|end|>",
    "▁",
    "\t",
    "'s",
]
PROSE = "".join(f"{'para ' * (n % 7)}{n} of the text, naïve.{chr(10) * (n % 5 + 1)}" for n in range(300))
TEXTS = {
    "prose": PROSE,
    "one line": PROSE.replace("\n", " "),
    "anything": " ".join(WORDS[n] for n in RNG.integers(0, len(WORDS), 3000)),
    "anything, joined": "".join(WORDS[n] for n in RNG.integers(0, len(WORDS), 3000)),
    "lines": "para\n\n\npara  x\r\n\r\n" * 300,
    "digits": "1234567890" * 500,
    "spaces": "a" + " " * 5000 + "b",
    "one word": "word" * 1500,
    "special tokens": "a <|end|> b" * 500,
    "decomposed": (" " + "nai\u0308ve" * 12 + ".") * 60,
    "compatible": (" " + "ⓟara" * 12 + "⅒1234567½1234567 a´b\u00a0\u00a8c") * 60,
    "wide special tokens": "a b\uff1c|end|\uff1e c" * 300,
    "numbers": "".join(f"{n**40} and {n} " for n in range(3, 60)),
}


def trained(model, trainer, pre_tokenizer, normalizer=None, decoder=None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator([PROSE, " ".join(WORDS) * 20], trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def bpe(pre_tokenizer, normalizer=None) -> Tokenizer:
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    return trained(models.BPE(), trainer, pre_tokenizer, normalizer)


def split(pattern: str):
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def normal_end(made: Tokenizer) -> Tokenizer:
    """Add a token that is matched in normalized text, and return the tokenizer."""
    made.add_tokens([AddedToken("b<", normalized=True)])
    return made


def pieces_of_words(pre_tokenizer, normalizer=None) -> Tokenizer:
    """Return a BPE tokenizer like those of SentencePiece, in which ▁ occurs only at the start of a word."""
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["<unk>"])
    made = trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, pre.Metaspace(), None)
    made.pre_tokenizer = pre_tokenizer  # None: the complete text is one word
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def signed():
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return trained(models.Unigram(), trainer, pre.Metaspace(prepend_scheme="always"), None, decoders.Metaspace())


TOKENIZERS = {  # name -> (constructor, whether prose can be split into pieces)
    "gpt2": (lambda: bpe(pre.ByteLevel(add_prefix_space=False)), True),
    "gpt2 with a prefix": (lambda: bpe(pre.ByteLevel(add_prefix_space=True)), False),
    "cl100k": (lambda: bpe(split(CL100K)), True),
    "cl100k, composed": (lambda: bpe(split(CL100K), normalizers.NFC()), True),
    "gpt2, compatible": (lambda: bpe(pre.ByteLevel(add_prefix_space=False), normalizers.NFKC()), True),
    "cl100k, compatible": (lambda: normal_end(bpe(split(CL100K), normalizers.NFKC())), True),
    "from the right": (lambda: bpe(split(FROM_THE_RIGHT)), True),
    "lower case": (lambda: bpe(split(CL100K), normalizers.Lowercase()), False),
    "first": (lambda: pieces_of_words(pre.Metaspace(prepend_scheme="first")), True),
    "always": (lambda: pieces_of_words(pre.Metaspace(prepend_scheme="always")), True),
    "unsplit": (lambda: pieces_of_words(pre.Metaspace(prepend_scheme="always", split=False)), True),
    "llama 2": (lambda: pieces_of_words(None, signed()), True),
    "unigram": (unigram, True),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def codec(request, tmp_path_factory) -> tuple[TokenizerCodec, bool]:
    make, splits = TOKENIZERS[request.param]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = make()
    path.write_text(made.to_str())
    return TokenizerCodec(str(path), None, "replace"), splits


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizing_in_pieces_matches_complete_text(codec, text, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 200)
    monkeypatch.setattr(pieces, "WINDOW", 64)
    found, splits = codec
    content = TEXTS[text]
    wanted = found.tokenizer.encode(content, add_special_tokens=False).ids
    assert found.encode_file(content.encode(), "it").tolist() == wanted
    if text in ("prose", "one line"):
        assert (len(found.pieces(content)) > 5) == splits


def test_text_without_boundary_is_not_split(codec, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 200)
    for text in ("", "short", "word" * 3000):
        assert codec[0].pieces(text) == ([text] if text else [])
