"""One DALI pipeline: what a function gives for step 0, 1, 2, ... ahead of need, on the GPU where there is one.

A batch of DALI is one flat sample here, the whole share of a step: a sample for each sequence costs 1 us apiece
(measured: 1.3 to 1.4 times the time). The function is called with the number of the step and has no state, so that
nothing of the pipeline has to be saved; what has been handed over, not what has been read, is the run's cursor.

N rows (sequences) of a step on this rank, T tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nvidia.dali import Pipeline, fn, types

from gangline_dataloader.sources.windows import StoredRows

_NO_MASK = np.zeros((0, 0), np.uint8)
# by the kind and width of a dtype; DALI's module makes these names when it is loaded
_NAMES = {"u1": "UINT8", "u2": "UINT16", "u4": "UINT32", "i4": "INT32", "i8": "INT64"}
_TYPES = {kind: getattr(types, name) for kind, name in _NAMES.items()}


@dataclass
class StepTensors:
    """`StoredRows` in memory of DALI's: tokens and mask (uint8; empty for none) on the device, ends in the host's."""

    tokens: torch.Tensor
    ends: torch.Tensor
    loss_mask: torch.Tensor


class StepPipeline:
    """`read(n)` for n = 0, 1, 2, ..., `depth` steps ahead of `take`.

    dtype  of the tokens
    What `read` raises ahead of need is raised by the `take` of its step, and of every one after it.
    """

    def __init__(self, read: Callable[[int], StoredRows], dtype: np.dtype, device: torch.device, depth: int) -> None:
        self._read, self._device, self._taken = read, device, 0
        self._failed: tuple[int, BaseException] | None = None
        self._spare = StoredRows(np.zeros((1, 1), dtype), np.zeros(0, np.int32))
        number = None if device.type == "cpu" else device.index or 0
        # Only the dynamic executor lets go of an output when its last tensor does; the others fill it again.
        self._pipeline = Pipeline(
            batch_size=1, num_threads=1, device_id=number, prefetch_queue_depth=depth, exec_dynamic=True
        )
        with self._pipeline:
            kinds = [_TYPES[np.dtype(dtype).str[1:]], _TYPES["i4"], _TYPES["u1"]]
            tokens, ends, loss_mask = fn.external_source(
                self._fed, num_outputs=3, batch=True, dtype=kinds, ndim=[2, 1, 2]
            )
            if number is not None:
                tokens, loss_mask = tokens.gpu(), loss_mask.gpu()
            self._pipeline.set_outputs(tokens, ends, loss_mask)
        self._pipeline.build()

    def take(self) -> StepTensors:
        """The next step. Its memory is the caller's as long as it holds a tensor of it."""
        if self._failed is not None and self._taken >= self._failed[0]:
            raise self._failed[1]
        given: Sequence[Any]
        if self._device.type == "cpu":
            given = self._pipeline.run()
        else:  # the copies are ordered before what the step's own stream does next; nobody waits in the host
            given = self._pipeline.run(torch.cuda.current_stream(self._device).cuda_stream)
        if self._failed is not None and self._taken >= self._failed[0]:
            raise self._failed[1]
        self._taken += 1
        return StepTensors(*(torch.from_dlpack(one[0]) for one in given))

    def _fed(self, step: int) -> tuple[list[np.ndarray], ...]:
        if self._failed is None:
            try:
                return _lists(self._read(step))
            except BaseException as error:
                self._failed = (step, error)
        return _lists(self._spare)


def _lists(rows: StoredRows) -> tuple[list[np.ndarray], ...]:
    mask = _NO_MASK if rows.loss_mask is None else rows.loss_mask.view(np.uint8)
    return [rows.tokens], [rows.ends], [mask]
