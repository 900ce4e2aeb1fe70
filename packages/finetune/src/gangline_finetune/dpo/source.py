"""Pairs of answers in memory, each pair a row.

T tokens of a row
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gangline import UserError
from gangline.data import DataSource, FirstModel, Sample, Split, TemplateRefusal, TokenizerCodec, template_of
from gangline_finetune.chat.encode import MaskedTokens, encode, tokenizer_of
from gangline_finetune.chat.order import RowOrder
from gangline_finetune.chat.rows import of_split, rows
from gangline_finetune.chat.template import Rendered, rendered_after
from gangline_finetune.dpo.pairs import pair_of

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_finetune.dpo.config import PreferencesConfig

AT_ONCE = 64  # pairs that the first model is asked about at a time
Two = tuple[MaskedTokens, MaskedTokens]  # chosen and rejected


@dataclass(frozen=True)
class PairRow:
    """A pair in a row: chosen as document 0, rejected as 1, padding as 2.

    answers  (2, 2) int64: positions [start, stop) in each document of the inputs whose targets are the answer
    """

    tokens: np.ndarray
    document: np.ndarray
    position: np.ndarray
    answers: np.ndarray


class PreferenceSource(DataSource):
    """A sample is a pair. One target of it counts: what is divided by the number of targets is a mean over pairs.

    Beside the tokens it has `dpo_answers` (2, 2), as `PairRow`, `dpo_first` (2,) float64, how likely both answers are
    to the model that the run begins with, and `dpo_length`, T.
    """

    def __init__(
        self, pairs: list[Two], codec: TokenizerCodec, *, sequence_length: int, seed: int, split: str, told: str
    ) -> None:
        self.pairs, self.codec, self.sequence_length, self.told = pairs, codec, sequence_length, told
        self.order = RowOrder(len(pairs), seed, split)
        self.first: np.ndarray | None = None  # (pairs, 2)
        self._of = (seed, split, sequence_length, codec.identity)

    def row(self, number: int) -> PairRow:
        """Pair `number` as a row."""
        T, at = self.sequence_length, 0
        tokens, document = np.zeros(T + 1, self.codec.dtype), np.full(T + 1, 2)
        position, answers = np.zeros(T + 1, np.int64), np.zeros((2, 2), np.int64)
        for side, of in enumerate(self.pairs[number]):
            stop = at + len(of.tokens)
            tokens[at:stop], document[at:stop], position[at:stop] = of.tokens, side, np.arange(stop - at)
            learnt = np.flatnonzero(of.learnt)
            answers[side] = learnt[0] - 1, learnt[-1]
            at = stop
        position[at:] = np.arange(T + 1 - at)
        return PairRow(tokens, document[:-1], position[:-1], answers)

    def sample(self, i: int) -> Sample:
        """Raises RuntimeError before `begin`."""
        if self.first is None:
            raise RuntimeError("the first model has not been asked")
        number = self.order.row(i)
        row = self.row(number)
        counts = np.zeros(self.sequence_length, bool)
        counts[row.answers[0, 0]] = True
        return {  # type: ignore[typeddict-unknown-key]
            "tokens": row.tokens,
            "loss_mask": counts,
            "document": row.document,
            "position": row.position,
            "dpo_answers": row.answers,
            "dpo_first": self.first[number],
            "dpo_length": np.asarray(self.sequence_length),
        }

    def begin(self, model: FirstModel) -> None:
        """Raises UserError where a run goes on and what its first model said is gone."""
        kept = Path(model.directory) / f"first-model-{self.fingerprint()}.npy"
        if model.step == 0:
            self.first = self._asked(model)
            if model.writes:
                partial = kept.with_suffix(".partial")
                with partial.open("wb") as file:
                    np.save(file, self.first)
                partial.replace(kept)
            return
        try:
            self.first = np.load(kept)
            if self.first.shape != (len(self.pairs), 2):
                raise ValueError(f"it holds {self.first.shape}")
        except (OSError, ValueError, EOFError) as error:
            raise UserError(
                f"{kept} cannot be read.",
                "It has what the model that this run began with said of its pairs.",
                f"Start again:  train from={model.directory}",
            ) from error

    def _asked(self, model: FirstModel) -> np.ndarray:
        """(pairs, 2) float64."""
        found = []
        for start in range(0, len(self.pairs), AT_ONCE):
            samples = [
                self._side(n, side) for n in range(start, min(start + AT_ONCE, len(self.pairs))) for side in (0, 1)
            ]
            found.append(np.asarray(model.score(samples)).reshape(-1, 2))
            model.tell(f"the first model has been asked about {start + len(found[-1])} of {len(self.pairs)} pairs")
        return np.concatenate(found)

    def _side(self, number: int, side: int) -> Sample:
        """One answer of a pair: its targets are those that count."""
        row = self.row(number)
        start, stop = row.answers[side]
        counts = (row.document == side) & (row.position >= start) & (row.position < stop)
        return {"tokens": row.tokens, "loss_mask": counts, "document": row.document, "position": row.position}

    def length(self) -> int:
        return len(self.pairs)

    @cached_property
    def _fingerprint(self) -> str:
        digest = blake2b(repr(self._of).encode(), digest_size=16)
        for pair in self.pairs:
            for of in pair:
                digest.update(len(of.tokens).to_bytes(8, "little") + of.tokens.tobytes() + of.learnt.tobytes())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        return self._fingerprint

    def describe(self) -> str:
        return f"{len(self.pairs)} pairs of answers{self.told}"

    def encode(self, text: str) -> list[int]:
        return self.codec.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.codec.decode(tokens)


def build(config: PreferencesConfig, run: Run, split: Split) -> PreferenceSource:
    """Read and tokenize one split. Raises UserError where no pair is left."""
    tokenizer = tokenizer_of(config.tokenizer, run.model.pretrained())
    codec, template = TokenizerCodec(tokenizer, None, "replace"), template_of(tokenizer, config.template)
    texts: list[Rendered] = []
    left_out: Counter[str] = Counter()
    for where, row in of_split(list(rows(config.path)), config.validation_fraction, split):
        try:
            pair = pair_of(row, where)
            texts += [rendered_after(template, pair.prompt, side) for side in (pair.chosen, pair.rejected)]
        except TemplateRefusal as error:
            left_out[str(error)] += 1
    sides = encode(codec, texts)
    pairs = list(zip(sides[::2], sides[1::2], strict=True))
    room = run.batch.sequence_length + 1
    kept = [
        pair for pair in pairs if sum(len(of.tokens) for of in pair) <= room and all(of.learnt.any() for of in pair)
    ]
    left_out[f"longer than a row of {room} tokens"] = len(pairs) - len(kept)
    told = "".join(f"; {count} left out: {why}" for why, count in left_out.items() if count)
    if not kept:
        raise UserError(
            f"data.path={config.path} has no pair for {split}.",
            told.removeprefix("; ") or f"data.validation_fraction={config.validation_fraction} leaves none.",
            "Both answers of a pair, each with its prompt, go into one row: give a longer batch.sequence_length.",
        )
    T = run.batch.sequence_length
    return PreferenceSource(kept, codec, sequence_length=T, seed=run.seed, split=split, told=told)
