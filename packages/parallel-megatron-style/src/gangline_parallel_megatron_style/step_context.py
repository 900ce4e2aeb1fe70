"""The microbatches of a step or an evaluation on this rank, their frames, and the number of tokens in the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gangline.batch import Batch
from gangline.comm.base import Comm, Pending
from gangline.comm.purpose import mark_traffic
from gangline.model.forward_context import Collected, Frame
from gangline_basics.parallel.microbatch import count_on_host, make_frame


class StepContext:
    """Microbatches with their frames.

    collected: losses and metrics that modules emit in a step; None in an evaluation
    """

    def __init__(self, microbatches: Sequence[Batch], frames: Sequence[Frame], collected: Collected | None) -> None:
        self.batches, self.frames = list(microbatches), list(frames)
        self.collected = collected or Collected()
        self._counting: Pending[Tensor] | None = None
        self._tokens: int | None = None

    @mark_traffic("tokens")
    def count(self, whole: Sequence[Batch], readers: Comm) -> None:
        """Start to count the tokens in the loss, over the batches of all data ranks.

        whole    batches of this rank, before context parallelism splits them
        readers  the data ranks, which read different batches
        """
        self._counting = readers.start_all_reduce(count_on_host(whole))

    @property
    def tokens(self) -> int:
        """Return the number of tokens in the loss of the step, over all ranks; wait for `count`."""
        if self._tokens is None:
            assert self._counting is not None
            self._tokens = int(self._counting.wait())
        return self._tokens

    @tokens.setter
    def tokens(self, count: int) -> None:
        self._tokens = count


def make_local_frame(
    batch: Batch,
    number: int,
    seed: int,
    collected: Collected | None,
    own_tokens: Callable[[Tensor], Tensor],
    over_sequence: Callable[[Tensor], Tensor] | None,
    for_all_heads: Callable[[Tensor], Tensor] | None,
) -> Frame:
    """Return the frame of a microbatch: keys of random draws, loss mask and padding mask of the tokens on this rank.

    own_tokens     function: (B, T) of this rank's part of the sequences -> (B, t), split by sequence parallelism
    over_sequence, for_all_heads  as in `Frame`
    """
    frame = make_frame(batch, number, seed, collected)
    frame.over_sequence, frame.for_all_heads = over_sequence, for_all_heads
    whole = frame.sample, frame.document, frame.position
    for name in ("sample", "document", "position", "loss_mask", "padding"):
        of_tokens = getattr(frame, name)
        if of_tokens is not None:
            setattr(frame, name, own_tokens(of_tokens))
    frame.inner = whole
    return frame
