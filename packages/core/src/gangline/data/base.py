"""Data sources: the contract to return sample i of the run. Torch-free; samples are numpy arrays."""

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

    score      score(samples) returns the log-likelihood of each sample's valid targets under the model's current
               weights, in nats, (n,) float64. All ranks pass the same samples and get the complete result.
               score(samples, k) returns (n, k), for k losses per sample, as `Runtime.score`
    directory  run directory: files that the source stores there outlive the process
    step       number of steps done: 0 if the model has its initial weights
    writes     whether this rank writes the source's files into the directory; True on one rank
    tell       function that reports a line of the source's progress to the user
    parent     directory of the run whose weights this run started from (`run.weights`); None: no such run
    """

    score: Callable[..., np.ndarray]  # (samples, losses per sample = 1)
    directory: Path
    step: int
    writes: bool
    tell: Callable[[str], None] = lambda said: None
    parent: Path | None = None


class DataSource(ABC):
    """Contract of a data source: sample i is a pure function of (seed, split, i), not of state, rank or worker. Core
    maps the data cursor to i and splits the global batch over ranks.

    A source with a known number of samples repeats: `sample(i)` for i >= `count_samples()` is of a later epoch.
    """

    # number of threads of core's reader that call `sample` concurrently: 1 for arrays in memory or mmap, more if
    # `sample` waits for a disk or a network; `sample` must then be thread-safe
    threads: ClassVar[int] = 1
    # whether one rank reads the samples and sends them to its tensor, context and pipeline peers: for samples that are
    # expensive to compute. False: each rank reads for itself
    shared: ClassVar[bool] = False

    @abstractmethod
    def sample(self, i: int) -> Sample:
        """Return sample `i`, numbered from 0 at the start of the run."""

    @abstractmethod
    def count_samples(self) -> int | None:
        """Return the number of samples in one epoch; None: endless. Validation reads at most `validate.samples`."""

    @abstractmethod
    def compute_fingerprint(self) -> str:
        """Return a short hash that changes with the data or its order: equal hashes mean equal samples."""

    def continues(self, fingerprint: str, cursor: int, state: dict[str, Any]) -> bool:
        """Return whether a run whose source had this `fingerprint` may continue with this one from sample `cursor` on.

        state: result of `state(cursor)` of the run's former source. Called on all ranks before the first read, at a
        resume and at each rollback. If True although `fingerprint` differs from this source's (a corpus grew, a
        mixture changes from a later sample on), the run reads this source's samples from `cursor` on. The source then
        takes over `state`: its later fingerprint and state must also describe the samples before `cursor`.
        """
        return fingerprint == self.compute_fingerprint()

    def begin(self, model: ReferenceModel) -> None:
        """Prepare a source whose samples depend on the initial model.

        Called once on all ranks, after the weights are set and before the first sample is read. Raises UserError if
        `model` cannot score the samples.
        """

    def open_reader(self, place: ReadPlace) -> BatchReader:
        """Return a reader that prefetches batches; by default core's `SampleReader`, which calls `sample`."""
        from gangline.data.sample_reader import SampleReader

        return SampleReader(self, place)

    def describe(self) -> str:
        """Return one line for people: kind and size of the data."""
        return type(self).__name__

    def state(self, i: int) -> dict[str, Any]:
        """Return the JSON state of the source that a checkpoint with data cursor `i` stores."""
        return {}

    def compute_unigram_entropy(self) -> float | None:
        """Return the unigram entropy of the tokens, in nats per token; None if it is not known."""
        return None

    def identify_tokenizer(self) -> str | None:
        """Return an id that changes with the tokenizer or its end-of-text token; None if the tokenizer is unknown."""
        return None

    def decode(self, tokens: list[int]) -> str | None:
        """Return the tokens as text; None if they are not text."""
        return None

    def encode(self, text: str) -> list[int] | None:
        """Return the text as tokens; None if the data is not text."""
        return None
