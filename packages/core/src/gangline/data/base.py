"""The data contract: sample i of the run. Torch-free; samples are numpy arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

if TYPE_CHECKING:
    import numpy as np

Split = Literal["train", "validation"]


class Sample(TypedDict):
    """One sequence.

    tokens     (T+1,) any integer dtype: inputs and, one further on, targets
    loss_mask  (T,) bool, of the targets; absent: all count
    document   (T,) integers, number of the document within the sequence; absent: one document
    position   (T,) integers, of the token within its document; absent: 0 to T-1
    """

    tokens: np.ndarray
    loss_mask: NotRequired[np.ndarray]
    document: NotRequired[np.ndarray]
    position: NotRequired[np.ndarray]


class DataSource(ABC):
    """Sample i, pure in (seed, split, i): no state, no rank, no worker. Core maps the cursor to i and cuts the batch.

    A source that knows its length goes on past it: `sample(i)` for i >= `length()` is of the next epoch.
    """

    @abstractmethod
    def sample(self, i: int) -> Sample:
        """Sample number `i`, counted from the start of the run."""

    @abstractmethod
    def length(self) -> int | None:
        """Samples in one epoch; None: without end. Validation takes `validate.samples`, or all if there are fewer."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash that changes with the data or its order: two runs with the same one see the same samples."""

    def describe(self) -> str:
        """One line for people: how much of what."""
        return type(self).__name__

    def state(self, i: int) -> dict[str, Any]:
        """JSON to keep beside the cursor `i`."""
        return {}

    def unigram_entropy(self) -> float | None:
        """Nats a token of a model that knows only how frequent each token is, or None where nobody counted."""
        return None

    def decode(self, tokens: list[int]) -> str | None:
        """Tokens as text, or None where they are not text."""
        return None

    def encode(self, text: str) -> list[int] | None:
        """Text as tokens, or None where there is no text."""
        return None
