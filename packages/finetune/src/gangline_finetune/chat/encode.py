"""A rendered text as tokens, and which of them are to be learnt. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gangline import UserError
from gangline.data import TokenizerCodec
from gangline_finetune.chat.template import Rendered


@dataclass(frozen=True)
class MaskedTokens:
    """tokens (n,), learnt (n,) bool: those that the assistant said."""

    tokens: np.ndarray
    learnt: np.ndarray


def encode(codec: TokenizerCodec, texts: list[Rendered]) -> list[MaskedTokens]:
    """Each text; a token is learnt where it begins in an answer. Special tokens are those that the template wrote.

    An answer ends with the last special token behind its words, where there is one: what follows that, such as a line's
    end, is written when no model is asked any more. (The last, for calls of tools stand between words and end.)
    """
    added = codec.tokenizer.get_added_tokens_decoder().items()
    special = np.asarray([id for id, token in added if token.special], np.int64)
    encoded = codec.tokenizer.encode_batch([text.text for text in texts], add_special_tokens=False)
    found = []
    for text, tokens in zip(texts, encoded, strict=True):
        begins = np.asarray([start for start, _ in tokens.offsets], np.int64)
        learnt = np.zeros(len(begins), bool)
        is_special = np.isin(np.asarray(tokens.ids, np.int64), special)
        for start, stop, said in text.answers:
            ends = begins[is_special & (begins >= said) & (begins < stop)]
            learnt |= (begins >= start) & (begins <= ends[-1] if len(ends) else begins < stop)
        found.append(MaskedTokens(np.asarray(tokens.ids, codec.dtype), learnt))
    return found


def tokenizer_of(named: str | None, weights: str | None) -> str:
    """The tokenizer.json of a run: what the user named, or the one beside the model's weights. Raises UserError."""
    if named is not None:
        return named
    beside = None if weights is None else Path(weights).expanduser() / "tokenizer.json"
    if beside is None or not beside.exists():
        why = "model.weights is not given." if beside is None else f"There is no {beside}."
        raise UserError("data.tokenizer is not given.", why, "data.tokenizer=DIR/tokenizer.json")
    return str(beside)


def check_same(tokenizer: str, codec: TokenizerCodec, weights: str | None) -> None:
    """Raises UserError where the model's weights lie beside a tokenizer that has other tokens."""
    beside = None if weights is None else Path(weights).expanduser() / "tokenizer.json"
    if beside is None or not beside.exists() or beside.samefile(Path(tokenizer).expanduser()):
        return
    theirs = TokenizerCodec(str(beside), None, "replace")
    ours, other = (one.tokenizer.get_vocab(with_added_tokens=True) for one in (codec, theirs))
    differ = sorted(word for word in ours if other.get(word, ours[word]) != ours[word])
    if differ or ours.keys() - other.keys():
        example = (differ or sorted(ours.keys() - other.keys()))[0]
        raise UserError(
            f"data.tokenizer={tokenizer} is another model's.",
            f"{example!r} is token {ours[example]} there, and {other.get(example, 'no token')} of {beside}.",
            f"data.tokenizer={beside}",
        )
