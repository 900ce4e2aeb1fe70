"""Fast byte-level BPE: tiktoken encodes by the vocabulary of a tokenizer.json, to equal tokens, several times faster.

tiktoken merges by the rank of the merged token, tokenizers by the rank of the pair. Both libraries give equal tokens if
exactly one pair merges to each token, the text of each token is encoded to that token, and training was greedy, as in
every known trainer. The code checks the first two conditions, and encodes other vocabularies by tokenizers. The third
is not proven, so one document in `SAMPLED` is encoded by both libraries, and a difference ends the preparation.
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
# GPT-2 split pattern (Radford et al. 2019), the default of ByteLevel in the tokenizers library.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class FastBpe(TextCodec):
    """Text codec that encodes documents by tiktoken; it must agree with the codec `slow` of tokenizers.

    `encode_file` raises UserError if a sampled document is encoded differently.
    """

    def __init__(self, slow: TokenizerCodec, encoding: Encoding, ids: np.ndarray, added: list[str]) -> None:
        self.slow, self.encoding, self.ids = slow, encoding, ids
        self.vocab_size, self.separator, self.identity = slow.vocab_size, slow.separator, slow.identity
        self.dtype = slow.dtype
        self._starts = sorted({token[:2] for token in added})  # few prefixes, so that a text is searched fast

    def encode_file(self, content: bytes, name: str) -> np.ndarray:
        text = content.decode(errors=self.slow.errors)
        if any(start in text for start in self._starts):  # the text may hold an added token, which no merge makes
            return self.slow.encode_file(content, name)
        parts = [self.encoding.encode_to_numpy(part, disallowed_special=()) for part in self.slow.pieces(text)]
        tokens = self.ids[np.concatenate([np.empty(0, np.uint32), *parts])]
        if xxhash.xxh3_64_intdigest(content) % SAMPLED == 0 and not np.array_equal(
            tokens, self.slow.encode_file(content, name)
        ):
            raise UserError(
                f"tiktoken and tokenizers encode {name} to different tokens with {self.slow.path}.",
                "tiktoken does not reproduce this tokenizer exactly.",
                "--tokenise-with tokenizers",
            )
        return tokens

    def encode(self, text: str) -> list[int]:
        return self.slow.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.slow.decode(tokens)


def build_fast_bpe(slow: TokenizerCodec) -> FastBpe | None:
    """Build the fast codec of a tokenizer; None if it is not a byte-level BPE or tiktoken is not installed."""
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
    except Exception:  # a pattern that tiktoken cannot read: ValueError, or a panic of its Rust part
        return None
    letters = build_byte_alphabet()
    ids = [model["vocab"]["".join(letters[byte] for byte in token)] for token in ranks]
    return FastBpe(slow, encoding, np.array(ids, slow.dtype), added_tokens)


def get_split_pattern(content: dict[str, Any]) -> str | None:
    """Return the regular expression that splits a text; None if the tokenizer normalises or splits in another way."""
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
    """Return whether a model only merges: BPE without affixes or byte fallback (`TokenizerCodec` turns dropout off)."""
    twists = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return model.get("type") == "BPE" and not any(model.get(twist) for twist in twists)


def rank_tokens(model: dict[str, Any]) -> dict[bytes, int] | None:
    """Rank the tokens by their bytes: the 256 bytes, then the results of merges, in order.

    None if two merges make one token, or a token or byte is missing from the vocabulary.
    """
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
    """Return whether merging encodes each token's text to the token itself, as tiktoken's look-up does.

    With `ignore_merges` the library tokenizers first looks up a text in the vocabulary. Then every vocabulary entry
    except `added` must be in `tokens`.
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
    """Build the alphabet of byte-level vocabularies: visible bytes as themselves, others as U+0100 and following."""
    visible_bytes = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in visible_bytes else next(substitutes)) for byte in range(256)]
