"""The data contract: sample i of the run. Torch-free; samples are numpy arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from gangline.data.reader import BatchReader, ReadPlace
    from gangline.data.sample import Sample

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class FirstModel:
    """What a source may ask of the run before anything of it is read (`DataSource.begin`).

    score      log-likelihood in nats of the targets that count of each of these samples, (n,) float64, by the model as
               it is now. All ranks call it with the same samples, and all get all of the answer. With a number k
               behind them (n, k): losses per sample, as in `Runtime.score`
    directory  of the run: what is kept there outlives the process
    step       steps that are done: 0 where the model is the one that the run begins with
    writes     whether this rank is the one to write into the directory
    tell       says to people how far the source is, at times
    parent     directory of the run with whose weights this one began (`run.weights`); None: it has none
    """

    score: Callable[..., np.ndarray]  # (samples, k = 1)
    directory: Path
    step: int
    writes: bool
    tell: Callable[[str], None] = lambda said: None
    parent: Path | None = None


class DataSource(ABC):
    """Sample i, pure in (seed, split, i): no state, no rank, no worker. Core maps the cursor to i and cuts the batch.

    A source that knows its length goes on past it: `sample(i)` for i >= `count_samples()` is of the next epoch.

    threads  in how many threads at once core's reader calls `sample`: 1 where arrays are in memory or mapped, more
             where a sample waits for a disk or a network, and `sample` may be called from several at once
    shared   whether one rank reads what its tensor, context and pipeline peers need, and hands it to them: for samples
             that are dear to make. Else each reads for itself
    """

    threads: ClassVar[int] = 1
    shared: ClassVar[bool] = False

    @abstractmethod
    def sample(self, i: int) -> Sample:
        """Sample number `i`, counted from the start of the run."""

    @abstractmethod
    def count_samples(self) -> int | None:
        """Samples in one epoch; None: without end. Validation takes `validate.samples`, or all if there are fewer."""

    @abstractmethod
    def compute_fingerprint(self) -> str:
        """A short hash that changes with the data or its order: two runs with the same one see the same samples."""

    def continues(self, fingerprint: str, cursor: int, state: dict[str, Any]) -> bool:
        """Whether a run whose data had this `fingerprint` may go on with this source from sample `cursor` on.

        state: what `state(cursor)` of its source gave. Called on all ranks before anything is read, for a resume and
        for each way back. A source that says yes to another fingerprint than its own (a corpus that grew, a mixture
        that changes further on) gives the run's samples from then on: what it needs to know of the past it takes from
        `state`, and its own `fingerprint` and `state` tell it on.
        """
        return fingerprint == self.compute_fingerprint()

    def begin(self, model: FirstModel) -> None:
        """Called once on all ranks, when the weights are there and before the first sample is read.

        For a source whose samples hold what the model says of them. Raises UserError where it cannot be had.
        """

    def open_reader(self, place: ReadPlace) -> BatchReader:
        """Whole batches of this source, read ahead of need: core's own reader of `sample`, or one that knows better."""
        from gangline.data.sample_reader import SampleReader

        return SampleReader(self, place)

    def describe(self) -> str:
        """One line for people: how much of what."""
        return type(self).__name__

    def state(self, i: int) -> dict[str, Any]:
        """JSON to keep beside the cursor `i`."""
        return {}

    def compute_unigram_entropy(self) -> float | None:
        """Nats a token of a model that knows only how frequent each token is, or None where nobody counted."""
        return None

    def identify_tokenizer(self) -> str | None:
        """A text that changes with the tokenizer and its end of text; None where the tokenizer is not known."""
        return None

    def decode(self, tokens: list[int]) -> str | None:
        """Tokens as text, or None where they are not text."""
        return None

    def encode(self, text: str) -> list[int] | None:
        """Text as tokens, or None where there is no text."""
        return None
