"""Fill-in-the-middle: some documents are rearranged so that a model learns to write what lies between two texts.

Bavarian et al., arXiv 2207.14255, section 3: a document is cut at two places into prefix, middle and suffix, and
becomes PRE prefix SUF suffix MID middle (PSM), or, for a share of them, PRE SUF suffix MID prefix middle (SPM). The
three marks take the place of its last three tokens, so that nothing else moves. All tokens count in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gangline import UserError
from gangline.data import TokenizerCodec
from gangline_dataloader.sources.codec import codec
from gangline_dataloader.store.stored import StoreTokens
from gangline_dataloader.store.tokens import Tokens

if TYPE_CHECKING:
    from gangline.data import Split
    from gangline_dataloader.config import SequenceConfig

LEAST = 8  # tokens of a document that is worth cutting
MARKS = 3


class Infill:
    """What happens to a row is a function of (key, number of the sample) and of its tokens.

    rate         of the documents are rearranged
    spm_rate     of those in the order SPM
    marks        the tokens PRE, MID and SUF
    end_of_text  the token behind each document
    key          seed and split
    """

    def __init__(
        self, rate: float, spm_rate: float, marks: Sequence[int], end_of_text: int | None, *key: object
    ) -> None:
        self.rate, self.spm_rate, self.end_of_text, self.key = rate, spm_rate, end_of_text, key
        self.prefix, self.middle, self.suffix = marks

    def apply(self, tokens: np.ndarray, number: int, cuts: Sequence[int] = ()) -> None:
        """Rearrange a row (n,) in place; `cuts` are places where documents end without their token for it."""
        ends = np.empty(0, np.int64) if self.end_of_text is None else np.flatnonzero(tokens == self.end_of_text) + 1
        places = np.unique(np.concatenate([[0], ends, np.asarray(cuts, np.int64), [len(tokens)]]))
        digest = blake2b(repr((self.key, "infill", number)).encode(), digest_size=16).digest()
        draws = np.random.Philox(key=np.frombuffer(digest, "<u8")).random_raw(4 * len(places)).reshape(-1, 4)
        shares = draws / 2.0**64
        for (start, stop), share, draw in zip(pairwise(places.tolist()), shares, draws, strict=False):
            if tokens[stop - 1] == self.end_of_text:
                stop -= 1
            if stop - start >= LEAST and share[0] < self.rate:
                kept = stop - start - MARKS
                first, second = sorted(int(one) % (kept + 1) for one in draw[2:].tolist())
                tokens[start:stop] = self._rearranged(tokens[start : stop - MARKS], first, second, share[1])

    def _rearranged(self, text: np.ndarray, first: int, second: int, share: float) -> np.ndarray:
        prefix, middle, suffix = text[:first], text[first:second], text[second:]
        parts: tuple[list[int] | np.ndarray, ...]
        if share < self.spm_rate:
            parts = ([self.prefix, self.suffix], suffix, [self.middle], prefix, middle)
        else:
            parts = ([self.prefix], prefix, [self.suffix], suffix, [self.middle], middle)
        return np.concatenate([np.asarray(part, text.dtype) for part in parts])


def marks_of(names: Sequence[str], store: str, ids: Sequence[int | None]) -> list[int]:
    """The tokens of the three marks. Raises UserError where the tokenizer has one of them not."""
    found = [one for one in ids if one is not None]
    if len(names) != MARKS or len(found) != MARKS or len(set(found)) != MARKS:
        missing = [name for name, one in zip(names, ids, strict=False) if one is None]
        raise UserError(
            f"data.fim_tokens={list(names)}: {', '.join(missing) or 'there must be three different ones'}"
            f"{f' is no token of {store}' if missing else ''}.",
            "They mark prefix, middle and suffix, and are tokens of their own in the store's tokenizer.",
            "gangline data prepare --tokenizer FILE with a tokenizer that has them, or data.fim_rate=0",
        )
    return found


def infill_of(config: SequenceConfig, stores: Sequence[Tokens], seed: int, split: Split) -> Infill | None:
    """What `config` asks for, of stores that share a tokenizer; of training alone: what is held out is read as it is.

    Raises UserError where the tokenizer has no marks, or a store says which tokens are to be learnt: that is of their
    places, and they would be moved.
    """
    if not config.fim_rate or split != "train":
        return None
    for store in stores:
        if store.masked:
            raise UserError(
                "data.fim_rate: conversations are not rearranged.",
                f"{_called(store)} says of each token whether it is to be learnt.",
                "data.fim_rate=0",
            )
    one = stores[0]
    known = codec(one)
    ids = [
        known.tokenizer.token_to_id(name) if isinstance(known, TokenizerCodec) else None for name in config.fim_tokens
    ]
    marks = marks_of(config.fim_tokens, f"the tokenizer of {_called(one)}", ids)
    return Infill(config.fim_rate, config.fim_spm_rate, marks, one.end_of_text, seed, split)


def _called(store: Tokens) -> str:
    return store.name if isinstance(store, StoreTokens) else "files of others"
