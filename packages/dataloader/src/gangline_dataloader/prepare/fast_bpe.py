"""Byte-level BPE through tiktoken where a tokenizer.json is one: the same tokens, several times as fast.

tiktoken merges by the rank of the merged token, tokenizers by the rank of the pair. In a vocabulary whose every token
is made by one pair, and comes back as itself when it is tokenised, the two agree wherever training has been greedy, as
it is in every trainer known; that is no proof, and so one document in `SAMPLED` is tokenised by both, and a difference
ends the work. Everything that is not such a vocabulary goes the way of tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gangline import UserError
from gangline_basics.data.codec import TextCodec, TokenizerCodec

if TYPE_CHECKING:
    from tiktoken import Encoding

SAMPLED = 64
# How GPT-2 splits a text before merging, which tokenizers' ByteLevel stands for (Radford et al. 2019).
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class FastBpe(TextCodec):
    """A tokenizer whose documents tiktoken encodes; `slow` is what it has to agree with."""

    def __init__(self, slow: TokenizerCodec, encoding: Encoding, ids: np.ndarray, added: list[str]) -> None:
        self.slow, self.encoding, self.ids = slow, encoding, ids
        self.vocab_size, self.separator, self.identity = slow.vocab_size, slow.separator, slow.identity
        self.dtype = slow.dtype
        self._starts = sorted({token[:2] for token in added})  # few, so that a text is searched fast

    def encode_file(self, content: bytes, name: str) -> np.ndarray:
        text = content.decode(errors=self.slow.errors)
        if any(start in text for start in self._starts):  # perhaps a token that is not made by merging
            return self.slow.encode_file(content, name)
        parts = [self.encoding.encode_to_numpy(part, disallowed_special=()) for part in self.slow.pieces(text)]
        tokens = self.ids[np.concatenate([np.empty(0, np.uint32), *parts])]
        if xxhash.xxh3_64_intdigest(content) % SAMPLED == 0 and not np.array_equal(
            tokens, self.slow.encode_file(content, name)
        ):
            raise UserError(
                f"{name}: tiktoken and tokenizers differ about {self.slow.path}.",
                "The fast way does not know this vocabulary well enough.",
                "--tokenise-with tokenizers",
            )
        return tokens

    def encode(self, text: str) -> list[int]:
        return self.slow.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.slow.decode(tokens)


def build_fast_bpe(slow: TokenizerCodec) -> FastBpe | None:
    """The fast way of a tokenizer, or None where it is no byte-level BPE or tiktoken is not installed."""
    try:
        from tiktoken import Encoding
    except ImportError:
        return None
    content = json.loads(Path(slow.path).expanduser().read_bytes())
    pattern, model = get_split_pattern(content), content["model"]
    if pattern is None or not is_plain_bpe(model):
        return None
    ranks = rank_tokens(model)
    added_tokens = [token["content"] for token in content.get("added_tokens") or ()]
    if ranks is None or not is_mergeable(model, list(ranks), added_tokens):
        return None
    try:
        encoding = Encoding("gangline", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except Exception:  # the library raises ValueError and what its Rust half panics with: a pattern it cannot read
        return None
    letters = build_byte_alphabet()
    ids = [model["vocab"]["".join(letters[byte] for byte in token)] for token in ranks]
    return FastBpe(slow, encoding, np.array(ids, slow.dtype), added_tokens)


def get_split_pattern(content: dict[str, Any]) -> str | None:
    """The regular expression that splits a text, or None where there is more to it."""
    before = content.get("pre_tokenizer")
    if content.get("normalizer") is not None or before is None:
        return None
    steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    level = steps[-1]
    if level["type"] != "ByteLevel" or level.get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return GPT2 if level.get("use_regex", True) else None
    split = steps[0]
    plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split.get("invert")
    if len(steps) > 2 or level.get("use_regex", True) or not plain:
        return None
    pattern: str | None = split["pattern"].get("Regex")
    return pattern


def is_plain_bpe(model: dict[str, Any]) -> bool:
    """Whether nothing but merging happens to a piece of text; dropout of merges is off (`TokenizerCodec`)."""
    twists = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return model.get("type") == "BPE" and not any(model.get(twist) for twist in twists)


def rank_tokens(model: dict[str, Any]) -> dict[bytes, int] | None:
    """Bytes of a token -> its rank: the bytes themselves, then what merges make; None where two make the same."""
    bytes_of = {letter: byte for byte, letter in enumerate(build_byte_alphabet())}
    ranks = {bytes([byte]): byte for byte in range(256)}
    if any(letter not in model["vocab"] for letter in bytes_of):
        return None
    for merge in model["merges"]:
        name = "".join(merge if isinstance(merge, list) else merge.split(" "))
        if name not in model["vocab"] or any(letter not in bytes_of for letter in name):
            return None
        token = bytes(bytes_of[letter] for letter in name)
        if token in ranks:
            return None
        ranks[token] = len(ranks)
    return ranks


def is_mergeable(model: dict[str, Any], tokens: list[bytes], added: list[str]) -> bool:
    """Whether each token, as a piece of text of its own, becomes itself by merging (tiktoken looks it up).

    With `ignore_merges` tokenizers look pieces of text up in the vocabulary: all of it but `added` has to be `tokens`.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    letters, ignored = build_byte_alphabet(), bool(model.get("ignore_merges"))
    merges = [tuple(merge if isinstance(merge, list) else merge.split(" ")) for merge in model["merges"]]
    bare = Tokenizer(BPE(vocab=model["vocab"], merges=merges, ignore_merges=ignored))
    names = ["".join(letters[byte] for byte in token) for token in tokens]
    if ignored and not model["vocab"].keys() <= {*names, *added}:
        return False
    encodings = bare.encode_batch(names, add_special_tokens=False)
    return all(part.ids == [model["vocab"][name]] for part, name in zip(encodings, names, strict=True))


def build_byte_alphabet() -> list[str]:
    """Byte -> the letter that byte-level vocabularies write for it: itself where it is visible, else U+0100 on."""
    visible_bytes = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in visible_bytes else next(substitutes)) for byte in range(256)]
