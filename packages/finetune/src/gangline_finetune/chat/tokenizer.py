"""Tokenizer of chat data: its path, and the check that it matches the model. Torch-free."""

from __future__ import annotations

from pathlib import Path

from gangline import UserError
from gangline_basics.data.codec import TokenizerCodec


def find_tokenizer(named: str | None, weights: str | None) -> str:
    """Return the path of tokenizer.json: `named`, or the one in directory `weights`. Raises UserError without one."""
    if named is not None:
        return named
    beside = None if weights is None else Path(weights).expanduser() / "tokenizer.json"
    if beside is None or not beside.exists():
        why = (
            "The default is tokenizer.json in model.weights, which is not given."
            if beside is None
            else f"The default {beside} does not exist."
        )
        fix = "data.tokenizer=DIR/tokenizer.json, or model.weights=DIR of a model to fine-tune"
        raise UserError("data.tokenizer is not given.", why, fix)
    return str(beside)


def check_same(tokenizer: str, codec: TokenizerCodec, weights: str | None) -> None:
    """Raise UserError if the tokenizer in the directory `weights` has other token ids, or lacks tokens of `codec`."""
    beside = None if weights is None else Path(weights).expanduser() / "tokenizer.json"
    if beside is None or not beside.exists() or beside.samefile(Path(tokenizer).expanduser()):
        return
    theirs = TokenizerCodec(str(beside), None, "replace")
    ours, other = (one.tokenizer.get_vocab(with_added_tokens=True) for one in (codec, theirs))
    differ = sorted(word for word in ours if other.get(word, ours[word]) != ours[word])
    if differ or ours.keys() - other.keys():
        example = (differ or sorted(ours.keys() - other.keys()))[0]
        raise UserError(
            f"data.tokenizer={tokenizer} differs from the tokenizer in model.weights.",
            f"{example!r} has id {ours[example]} in data.tokenizer, and {other.get(example, 'no id')} in {beside}.",
            f"data.tokenizer={beside}",
        )
