"""The vocabulary that the tokens of a store are of."""

from __future__ import annotations

from gangline.data import ByteCodec, TextCodec, TokenizerCodec
from gangline_dataloader.store.stored import StoreTokens
from gangline_dataloader.store.tokens import Tokens


def codec(store: Tokens) -> TextCodec | None:
    """The vocabulary of a store, to show what was read as text; None where nobody knows it."""
    if not isinstance(store, StoreTokens):
        return None
    about = store.manifest.tokenizer
    if about.file is None:
        return ByteCodec(chr(about.end_of_text or 0))
    return TokenizerCodec(str(store.folder / about.file), None, "replace")
