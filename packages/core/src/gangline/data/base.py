"""Data sources: the contract, sample i of the run. Torch-free; samples are numpy arrays."""

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
class ReferenceModel:
    """The initial model of the run, for a source whose samples depend on it (`DataSource.begin`).

    score      score(samples) returns the log-likelihood of each sample's valid targets under the model as it is now, in
               nats, (n,) float64. All ranks pass the same samples and get the full result. score(samples, k) returns
               (n, k), with k losses per sample, as `Runtime.score`
    directory  run directory: files stored there outlive the process
    step       number of steps done: 0 if the model has its initial weights
    writes     whether this rank is the one that writes into the directory
    tell       reports the progress of the source to the user
    parent     directory of the run whose weights this one began with (`run.weights`); None: there is none
    """

    score: Callable[..., np.ndarray]  # (samples, k = 1)
    directory: Path
    step: int
    writes: bool
    tell: Callable[[str], None] = lambda said: None
    parent: Path | None = None


class DataSource(ABC):
    """Contract of a data source: sample i is a pure function of (seed, split, i), of no state, rank or worker. Core
    maps the cursor to i and splits the batch.

    A source with a known length starts over after it: `sample(i)` for i >= `count_samples()` is of a later epoch.

    threads  number of threads that call `sample` at once in core's reader: 1 if arrays are in memory or mapped, more if
             a sample waits for a disk or a network; `sample` must then be thread-safe
    shared   whether one rank reads for its tensor, context and pipeline peers and sends them the samples: for samples
             that are expensive to make. False: each rank reads for itself
    """

    threads: ClassVar[int] = 1
    shared: ClassVar[bool] = False

    @abstractmethod
    def sample(self, i: int) -> Sample:
        """Return sample number `i`, counted from the start of the run."""

    @abstractmethod
    def count_samples(self) -> int | None:
        """Return the number of samples in one epoch; None: endless. Validation takes `validate.samples` or fewer."""

    @abstractmethod
    def compute_fingerprint(self) -> str:
        """Return a short hash that changes with the data or its order: runs with one hash have the same samples."""

    def continues(self, fingerprint: str, cursor: int, state: dict[str, Any]) -> bool:
        """Return whether a run whose source had this `fingerprint` may continue with this one from sample `cursor` on.

        state: result of `state(cursor)` of the run's source. Called on all ranks before anything is read, for a
        resume and for each rollback. If True although `fingerprint` differs from this source's (a corpus grew, a
        mixture changes from a later sample on), the run reads this source's samples from `cursor` on. The source then
        restores itself from `state`, and its `compute_fingerprint` and `state` must include that, for the next resume.
        """
        return fingerprint == self.compute_fingerprint()

    def begin(self, model: ReferenceModel) -> None:
        """Prepare a source whose samples depend on the initial model.

        Called once on all ranks, after the weights are set and before the first sample is read. Raises UserError if
        this model cannot be scored.
        """

    def open_reader(self, place: ReadPlace) -> BatchReader:
        """Return a reader that prefetches batches: by default core's own, which calls `sample`."""
        from gangline.data.sample_reader import SampleReader

        return SampleReader(self, place)

    def describe(self) -> str:
        """Return one line for people: how much of what data."""
        return type(self).__name__

    def state(self, i: int) -> dict[str, Any]:
        """Return JSON that a checkpoint stores with the cursor `i`."""
        return {}

    def compute_unigram_entropy(self) -> float | None:
        """Return the unigram entropy of the tokens, in nats a token; None if it is not known."""
        return None

    def identify_tokenizer(self) -> str | None:
        """Return a text that changes with the tokenizer and its end of text; None if the tokenizer is not known."""
        return None

    def decode(self, tokens: list[int]) -> str | None:
        """Return the tokens as text; None if they are not text."""
        return None

    def encode(self, text: str) -> list[int] | None:
        """Return the text as tokens; None if the data is not text."""
        return None
