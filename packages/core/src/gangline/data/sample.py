"""One sequence, as a source gives it: numpy arrays by name. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NotRequired, Protocol, TypedDict

if TYPE_CHECKING:
    import numpy as np


class Sample(TypedDict):
    """One sequence.

    tokens     (T+1,) any integer dtype: inputs and, one further on, targets
    loss_mask  (T,) bool, of the targets; absent: all count
    document   (T,) integers, number of the document within the sequence; absent: one document
    position   (T,) integers, of the token within its document; absent: 0 to T-1
    filled     () integer: only the first so many of the T inputs are of documents, the others are padding; absent: all

    What else a source gives, arrays of one shape in all samples of a batch, is `Batch.extra`: moved with the batch,
    stacked, and never cut.
    """

    tokens: np.ndarray
    loss_mask: NotRequired[np.ndarray]
    document: NotRequired[np.ndarray]
    position: NotRequired[np.ndarray]
    filled: NotRequired[np.ndarray]


class GivesSamples(Protocol):
    """What core's own reader asks of a source: see `gangline.data.base.DataSource`."""

    threads: ClassVar[int]

    def sample(self, i: int) -> Sample: ...

    def count_samples(self) -> int | None: ...
