"""Conversion between texts and tokens for sampling: prompts, end tokens, stop strings. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.errors import UserError
from gangline.plugin import registry
from gangline_basics.data.codec import TextCodec, TokenizerCodec
from gangline_basics.data.named_tokens import read_generation_config, read_special_tokens

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline.data.vocabulary import Codec


def build_codec(run: Run) -> Codec:
    """Return the codec of a run's data, without reading the data if its options are sufficient."""
    return run.data.build_codec(run) or registry.build(run.data, run, "train")


def encode(codec: Codec, prompt: str | Sequence[int], run: Run, bos: bool = True) -> list[int]:
    """Return the prompt's tokens, preceded by the BOS that the tokenizer adds to a text, unless the prompt has it.

    An empty prompt becomes the BOS, or a newline if the tokenizer adds no BOS. bos: false for the text of a chat
    template, which writes its BOS. Raises UserError if the data is not text, or a token exceeds the model's vocabulary.
    """
    tokens = _encode_text(codec, prompt, bos) if isinstance(prompt, str) else list(prompt)
    if tokens is None:
        raise UserError("the data of this run is not text, so the model cannot generate text.")
    if not tokens:
        raise UserError(f"the prompt {prompt!r} has no tokens in the vocabulary of this run.", "Try another --prompt.")
    size = run.model.vocab_size
    if unknown := [token for token in tokens if not 0 <= token < size]:
        raise UserError(
            f"the prompt {prompt!r} has token {unknown[0]}, but the vocabulary of the model has {size} tokens.",
            "data.tokenizer may have changed since the run.",
        )
    return tokens


def _encode_text(codec: Codec, prompt: str, bos: bool) -> list[int] | None:
    if bos and isinstance(codec, TextCodec):
        before, own, _ = codec.encode_special(prompt)
        if before:
            return own if own[: len(before)] == before else [*before, *own]
    return codec.encode(prompt or "\n")


def spell(codec: Codec, tokens: list[int]) -> str:
    """Return tokens as text, with special tokens by their names, so that a stop string may name a special token."""
    return codec.decode_special(tokens) if isinstance(codec, TextCodec) else codec.decode(tokens) or ""


def cut_at_stop(codec: Codec, written: list[int], stop: Sequence[str]) -> tuple[list[int], str]:
    """Return (tokens that end before the first stop string, remaining text up to the stop string)."""
    text = spell(codec, written)
    end = len(truncate_at_stop(text, stop))
    for count in range(len(written), -1, -1):
        prefix = spell(codec, written[:count])
        if len(prefix) <= end and text.startswith(prefix):
            return written[:count], text[len(prefix) : end]
    return [], text[:end]


def decode_after(codec: Codec, prompt: list[int], written: list[int]) -> str:
    """Return the text of the generated tokens, decoded with the prompt; a tokenizer may drop a text's first space."""
    beginning, whole = codec.decode(prompt) or "", codec.decode([*prompt, *written]) or ""
    if whole.startswith(beginning):
        return whole[len(beginning) :]
    return codec.decode(written) or ""


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    return text[: min([len(text), *(text.find(word) for word in stop if word in text)])]


def find_ends(run: Run, codec: Codec) -> frozenset[int]:
    """Return the tokens that end a text: the separator between files, and eos tokens of tokenizer and weights."""
    ends: set[int] = set()
    if isinstance(codec, TextCodec) and codec.separator is not None:
        ends.add(codec.separator)
    if isinstance(codec, TokenizerCodec):
        word = read_special_tokens(Path(codec.path).expanduser().parent).get("eos_token")
        token = None if word is None else codec.tokenizer.token_to_id(word)
        ends |= set() if token is None else {token}
    directory = run.model.get_weights_directory()
    if directory is not None:
        eos_ids = read_generation_config(Path(directory).expanduser()).get("eos_token_id")
        ends |= {token for token in (eos_ids if isinstance(eos_ids, list) else [eos_ids]) if isinstance(token, int)}
    return frozenset(ends)
