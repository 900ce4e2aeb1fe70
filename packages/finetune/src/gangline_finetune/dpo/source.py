"""Pairs of answers in memory, one pair per row.

T tokens per row
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gangline import UserError
from gangline.data.base import ReferenceModel, Split
from gangline.data.sample import Sample
from gangline.storage.files import open_replacement
from gangline_basics.data.chat_tokens import MaskedTokens
from gangline_basics.data.codec import TokenizerCodec
from gangline_finetune.chat.templated import TemplatedSource, encode_rows

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_finetune.dpo.config import PreferencesConfig

AT_ONCE = 64  # number of pairs per call of the reference model
Two = tuple[MaskedTokens, MaskedTokens]  # chosen and rejected


class PreferenceSource(TemplatedSource):
    """Source whose sample is a pair: the chosen chat is document 0 of the row, the rejected chat document 1.

    The loss mask has one target per pair, so that a loss divided by the number of targets is a mean over pairs.
    Additional fields of a sample:

    dpo_answers  (2, n, 2) int64, spans [start, stop) of each side's answers: positions of the inputs whose targets
                 are the answer; n is the maximum number of answers per side, missing ones are empty spans
    dpo_first    (2,) float64, log-likelihoods of both sides' answers by the reference model
    dpo_length   T
    """

    def __init__(
        self, pairs: Sequence[Two], codec: TokenizerCodec, *, sequence_length: int, seed: int, split: str, note: str
    ) -> None:
        rows = [(2 * number, 2 * number + 1) for number in range(len(pairs))]
        sides = [side for pair in pairs for side in pair]
        super().__init__(sides, rows, codec, sequence_length=sequence_length, seed=seed, split=split, note=note)
        self.pairs = pairs
        self.first: np.ndarray | None = None  # reference log-likelihoods, (pairs, 2)
        self.answers = _find_answer_spans(sides).reshape(len(pairs), 2, -1, 2)

    def sample(self, i: int) -> Sample:
        """Return sample i. Raises RuntimeError before `begin`."""
        if self.first is None:
            raise RuntimeError("the reference model has not scored the pairs yet: call begin first")
        number = self.order.get_row(i)
        row, counts = self.fill_row(number), np.zeros(self.sequence_length, bool)
        counts[self.answers[number, 0, 0, 0]] = True
        return {  # type: ignore[typeddict-unknown-key]
            **row.make_sample(counts),
            "dpo_answers": self.answers[number],
            "dpo_first": self.first[number],
            "dpo_length": np.asarray(self.sequence_length),
        }

    def begin(self, model: ReferenceModel) -> None:
        """Score all pairs by the reference model at step 0, else read the scores. Raises UserError without scores."""
        path = Path(model.directory) / f"first-model-{self.compute_fingerprint()}.npy"
        if model.step == 0:
            self.first = self._score_pairs(model)
            if model.writes:
                _write(path, self.first)
            return
        inherited = None if model.parent is None else model.parent / path.name
        try:
            self.first = np.load(path if path.exists() or inherited is None else inherited)
            if self.first.shape != (self.count_samples(), 2):
                raise ValueError(f"the scores have shape {self.first.shape}")
        except FileNotFoundError as error:
            raise UserError(
                "the reference model of this run has not scored some pairs of data=preferences.",
                f"{path} does not exist: the pairs have changed, or a validation set was added.",
                "Restore the pairs, and remove an added set:  validate.sets.NAME=null",
                f"Or start a new run:  train from={model.directory}",
            ) from error
        except (OSError, ValueError, EOFError) as error:
            raise UserError(
                f"{path} cannot be read.",
                "The file stores the scores of the pairs by the reference model.",
                f"Start a new run:  train from={model.directory}",
            ) from error
        if model.writes and inherited is not None:
            _write(path, self.first)

    def _score_pairs(self, model: ReferenceModel) -> np.ndarray:
        """Return the reference model's log-likelihoods of (chosen, rejected), (pairs, 2) float64."""
        scores = []
        for start in range(0, self.count_samples(), AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, self.count_samples()))
            scores.append(np.asarray(model.score([self._make_sides(number) for number in numbers], 2)))
            model.tell(f"the reference model has scored {start + len(scores[-1])} of {self.count_samples()} pairs")
        return np.concatenate(scores)

    def _make_sides(self, number: int) -> Sample:
        """Return a pair as a sample to score. All answers are in the loss mask; each side gets a separate loss."""
        row = self.fill_row(number)
        return {  # type: ignore[typeddict-unknown-key]
            **row.make_sample(row.loss_mask[1:] & (row.document[1:] < 2) & (row.position[1:] > 0)),
            "dpo_apart": np.asarray(True),
        }

    def describe(self) -> str:
        return f"{self.count_samples()} pairs of answers{self.note}"


def _write(path: Path, first: np.ndarray) -> None:
    with open_replacement(path, durable=False) as file:
        np.save(file, first)


def _find_answer_spans(sides: Sequence[MaskedTokens]) -> np.ndarray:
    """Return the spans of consecutive loss targets in each side, as positions of their inputs, (sides, n, 2)."""
    spans = [np.flatnonzero(np.diff(side.loss_mask[1:], prepend=False, append=False)).reshape(-1, 2) for side in sides]
    whole = np.zeros((len(sides), max(map(len, spans)), 2), np.int64)
    for runs, into in zip(spans, whole, strict=True):
        into[: len(runs)] = runs
    return whole


def build(config: PreferencesConfig, run: Run, split: Split) -> PreferenceSource:
    """Read and tokenize one split. Raises UserError if no usable pair remains."""
    read, T = encode_rows(config, run, split), run.batch.sequence_length
    pairs = [(chosen, rejected) for chosen, rejected in read.rows]
    fit = [pair for pair in pairs if sum(len(side.tokens) for side in pair) <= T + 1]
    learnable_pairs = [pair for pair in fit if all(side.loss_mask[1:].any() for side in pair)]
    read.left_out[f"longer than a row of {T + 1} tokens"] = len(pairs) - len(fit)
    read.left_out["an answer without tokens in the loss"] = len(fit) - len(learnable_pairs)
    if not learnable_pairs:
        raise UserError(
            f"data.path={config.path} has no usable pair in the {split} split.",
            read.describe_left_out().removeprefix("; ")
            or f"data.validation_fraction={config.validation_fraction} leaves no pair for this split.",
            "A row must hold both answers of a pair, each with the prompt: increase batch.sequence_length.",
        )
    return PreferenceSource(
        learnable_pairs, read.codec, sequence_length=T, seed=run.seed, split=split, note=read.describe_left_out()
    )
