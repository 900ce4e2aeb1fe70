"""Sample: one sequence, as a source returns it: numpy arrays by name. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NotRequired, Protocol, TypedDict

if TYPE_CHECKING:
    import numpy as np


class Sample(TypedDict):
    """One sequence, as arrays by name.

    tokens     (T+1,) any integer dtype: inputs [:-1] and targets [1:]
    loss_mask  (T,) bool, which targets count; absent: all
    document   (T,) integers, number of the document within the sequence; absent: one document
    position   (T,) integers, of the token within its document; absent: 0 to T-1
    filled     () integer: number of the T inputs that are of documents, the rest is padding; absent: all

    Further arrays of a source, of one shape in all samples of a batch, are stacked into `Batch.extra`, which moves with
    the batch and is never sharded.
    """

    tokens: np.ndarray
    loss_mask: NotRequired[np.ndarray]
    document: NotRequired[np.ndarray]
    position: NotRequired[np.ndarray]
    filled: NotRequired[np.ndarray]


class GivesSamples(Protocol):
    """Methods of a source that core's own reader calls: see `gangline.data.base.DataSource`."""

    threads: ClassVar[int]

    def sample(self, i: int) -> Sample: ...

    def count_samples(self) -> int | None: ...
