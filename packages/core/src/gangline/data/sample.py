"""Sample: one sequence that a data source returns, as numpy arrays by name. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NotRequired, Protocol, TypedDict

if TYPE_CHECKING:
    import numpy as np


class Sample(TypedDict):
    """One sequence, as arrays by name.

    tokens     (T+1,) any integer dtype: inputs [:-1] and targets [1:]
    loss_mask  (T,) bool, targets that count in the loss; absent: all
    document   (T,) integers, number of the document within the sequence; absent: one document
    position   (T,) integers, position of the token within its document; absent: 0 to T-1
    filled     () integer, number of inputs before the padding; absent: no padding

    Further arrays of a source must have equal shapes in all samples of a batch; they are stacked into `Batch.extra`,
    which moves with the batch and is never sharded.
    """

    tokens: np.ndarray
    loss_mask: NotRequired[np.ndarray]
    document: NotRequired[np.ndarray]
    position: NotRequired[np.ndarray]
    filled: NotRequired[np.ndarray]


class GivesSamples(Protocol):
    """Methods of a data source that `SampleReader` calls: see `gangline.data.base.DataSource`."""

    threads: ClassVar[int]

    def sample(self, i: int) -> Sample: ...

    def count_samples(self) -> int | None: ...
