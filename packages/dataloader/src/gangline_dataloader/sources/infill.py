"""Fill-in-the-middle (FIM): some documents are rearranged so that a model learns to write the text between two texts.

Bavarian et al., arXiv 2207.14255, section 3: a document is split at two random offsets into prefix, middle and suffix,
and becomes PRE prefix SUF suffix MID middle (PSM), or, for a fraction of the documents, PRE SUF suffix MID prefix
middle (SPM). The three sentinel tokens replace the last three tokens of the document, so that its length stays the
same. All tokens of the document contribute to the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gangline import UserError
from gangline_basics.data.codec import TokenizerCodec
from gangline_dataloader.order.permutation import U64, derive_round_keys, mix
from gangline_dataloader.sources.codec import open_codec
from gangline_dataloader.store.stored import StoreTokens
from gangline_dataloader.store.tokens import Tokens

if TYPE_CHECKING:
    from gangline.data.base import Split
    from gangline_dataloader.config import SequenceConfig

LEAST = 8  # minimum number of tokens of a document to rearrange
MARKS = 3


class Infill:
    """Fill-in-the-middle over rows of tokens: a function of (key, sample number) and the tokens.

    rate         fraction of the documents that are rearranged
    spm_rate     fraction of the rearranged documents in the order SPM
    marks        sentinel tokens PRE, MID and SUF
    end_of_text  token after each document; None: no token
    key          seed and split
    """

    def __init__(
        self, rate: float, spm_rate: float, marks: Sequence[int], end_of_text: int | None, *key: object
    ) -> None:
        self.rate, self.spm_rate, self.end_of_text = rate, spm_rate, end_of_text
        self._keys = derive_round_keys(*key, "infill")
        self.prefix, self.middle, self.suffix = marks

    def apply(self, tokens: np.ndarray, numbers: np.ndarray, borders: np.ndarray | None = None) -> None:
        """Rearrange documents in rows `tokens` (N, n) of samples `numbers` (N,), in place.

        borders  (b,) offsets in the flattened rows at which documents end without an end-of-text token
        """
        flat, (N, n) = tokens.reshape(-1), tokens.shape
        ends = np.empty(0, np.int64) if self.end_of_text is None else np.flatnonzero(flat == self.end_of_text) + 1
        cuts = np.empty(0, np.int64) if borders is None else borders
        places = np.unique(np.concatenate([np.arange(N + 1) * n, ends, cuts]))
        start, stop = places[:-1], places[1:]
        row = start // n
        number = np.arange(len(start)) - np.searchsorted(start, row * n)  # index of the document in its row
        if self.end_of_text is not None:
            stop = stop - (flat[stop - 1] == self.end_of_text)
        rearranged = (stop - start >= LEAST) & (_scale_to_fraction(self._draw(numbers[row], number, 0)) < self.rate)
        start, stop, row, number = (each[rearranged] for each in (start, stop, row, number))
        lengths, samples = (stop - start - MARKS).astype(U64), numbers[row]
        cut = np.sort([self._draw(samples, number, which) % (lengths + U64(1)) for which in (1, 2)], axis=0).astype(
            np.int64
        )
        spm = _scale_to_fraction(self._draw(samples, number, 3)) < self.spm_rate
        for first, end, one, other, suffix_first in zip(
            start.tolist(), stop.tolist(), *cut.tolist(), spm.tolist(), strict=True
        ):
            self._rearrange(flat[first:end], one, other, suffix_first)

    def _draw(self, numbers: np.ndarray, document: np.ndarray, which: int) -> np.ndarray:
        """Draw random number `which` for documents (d,) of samples `numbers` (d,): (d,) uint64."""
        hashed = mix(mix(numbers.astype(U64) + self._keys[0]) ^ (document.astype(U64) + self._keys[1]))
        return mix(hashed + self._keys[2 + which])

    def _rearrange(self, tokens: np.ndarray, first: int, second: int, suffix_first: bool) -> None:
        """Rearrange a document (n,) in place, split at `first` and `second`; its last three tokens are lost."""
        text = tokens[:-MARKS].copy()
        suffix = len(text) - second
        if suffix_first:
            tokens[0], tokens[1], tokens[2 + suffix] = self.prefix, self.suffix, self.middle
            tokens[2 : 2 + suffix] = text[second:]
            tokens[3 + suffix :] = text[:second]
        else:
            tokens[0], tokens[1 + first], tokens[2 + first + suffix] = self.prefix, self.suffix, self.middle
            tokens[1 : 1 + first] = text[:first]
            tokens[2 + first : 2 + first + suffix] = text[second:]
            tokens[3 + first + suffix :] = text[first:second]


def _scale_to_fraction(draws: np.ndarray) -> np.ndarray:
    """Scale uint64 draws to [0, 1)."""
    return (draws >> U64(11)) * 2.0**-53


def get_mark_tokens(names: Sequence[str], store: str, ids: Sequence[int | None]) -> list[int]:
    """Return the ids of the three sentinel tokens. Raises UserError if one is missing or two are equal."""
    tokens = [one for one in ids if one is not None]
    if len(names) != MARKS or len(tokens) != MARKS or len(set(tokens)) != MARKS:
        missing = [name for name, one in zip(names, ids, strict=False) if one is None]
        raise UserError(
            f"data.fim_tokens={list(names)}: "
            + (f"{store} has no token {', '.join(missing)}." if missing else "expected three different tokens."),
            "The tokens mark prefix, middle and suffix; each must be one token of the store's tokenizer.",
            "Prepare the store with a tokenizer that has these tokens (--tokenizer FILE), or set data.fim_rate=0.",
        )
    return tokens


def build_infill(config: SequenceConfig, stores: Sequence[Tokens], seed: int, split: Split) -> Infill | None:
    """Build fill-in-the-middle for stores that share a tokenizer; None if it is off, or for the validation split.

    Raises UserError if the tokenizer lacks the sentinel tokens, or a store has a loss mask: it would not match the
    rearranged tokens.
    """
    if not config.fim_rate or split != "train":
        return None
    for store in stores:
        if store.masked:
            raise UserError(
                "data.fim_rate does not support stores of conversations.",
                f"{_name_store(store)} has a loss mask, which would not match rearranged tokens.",
                "data.fim_rate=0",
            )
    one = stores[0]
    codec = open_codec(one)
    ids = [
        codec.tokenizer.token_to_id(name) if isinstance(codec, TokenizerCodec) else None for name in config.fim_tokens
    ]
    marks = get_mark_tokens(config.fim_tokens, f"the tokenizer of {_name_store(one)}", ids)
    return Infill(config.fim_rate, config.fim_spm_rate, marks, one.end_of_text, seed, split)


def _name_store(store: Tokens) -> str:
    return store.name if isinstance(store, StoreTokens) else "the external files"
