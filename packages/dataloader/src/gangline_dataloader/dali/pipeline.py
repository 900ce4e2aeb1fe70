"""DALI pipeline that prefetches chunks 0, 1, 2, ..., which a function reads, to the GPU if there is one.

All sequences of a chunk make a single DALI sample, the only one of its DALI batch, because each DALI sample costs 1 us.
Executing the pipeline once takes as long as reading the tokens of many steps, so a chunk may have several steps. The
pipeline has no state to save, because the run's cursor counts the samples that `take` returned, not the samples that
were prefetched.

N rows (sequences) of a chunk on this rank, T tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gangline_dataloader.sources.windows import StoredRows

_NAMES = {"u1": "UINT8", "u2": "UINT16", "u4": "UINT32", "i1": "INT8", "i2": "INT16", "i4": "INT32", "i8": "INT64"}


@dataclass
class ChunkTensors:
    """The `StoredRows` of a chunk: tokens and loss mask on the device, in DALI memory; other fields in host memory."""

    tokens: torch.Tensor
    ends: np.ndarray
    loss_mask: torch.Tensor | None
    filled: np.ndarray | None


class ChunkPipeline:
    """A DALI pipeline that calls `read(n)` for n = 0, 1, 2, ..., `depth` chunks ahead of `take`.

    dtype   dtype of the tokens
    masked  whether `read` returns a loss mask
    An error of `read` is raised by the `take` of its chunk and by every later `take`.
    """

    def __init__(
        self, read: Callable[[int], StoredRows], dtype: np.dtype, masked: bool, device: torch.device, depth: int
    ) -> None:
        from nvidia.dali import Pipeline, fn, types  # an optional dependency: importing this module must not need it

        self._read, self._masked, self._device, self._taken = read, masked, device, 0
        self._failed: tuple[int, BaseException] | None = None
        # `ends` and `filled` of the prefetched chunks: small arrays that only the host needs
        self._rest: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
        self._spare = StoredRows(np.zeros((1, 1), dtype), np.zeros(0, np.int32), np.zeros((1, 1), bool))
        number = None if device.type == "cpu" else device.index or 0
        dtypes = [np.dtype(dtype), *([np.dtype(np.uint8)] if masked else [])]
        kinds = [getattr(types, _NAMES[one.str[1:]]) for one in dtypes]  # DALI defines these names when it is loaded
        # Only the dynamic executor keeps an output until its last tensor is freed; other executors overwrite it.
        self._pipeline = Pipeline(
            batch_size=1, num_threads=1, device_id=number, prefetch_queue_depth=depth, exec_dynamic=True
        )
        with self._pipeline:
            outputs = fn.external_source(self._feed, num_outputs=len(kinds), batch=True, dtype=kinds, ndim=2)
            self._pipeline.set_outputs(*(one if number is None else one.gpu() for one in outputs))
        self._pipeline.build()

    def take(self) -> ChunkTensors:
        """Return the next chunk. Its memory is valid while one of its tensors is held. Raises errors of `read`."""
        self._raise_failed()
        if self._device.type == "cpu":
            outputs = self._pipeline.run()
        else:  # orders the copies before the next work on the step's CUDA stream, without blocking the host
            outputs = self._pipeline.run(torch.cuda.current_stream(self._device).cuda_stream)
        self._raise_failed()
        tokens, *mask = (torch.from_dlpack(one[0]) for one in outputs)
        ends, fill_counts = self._rest.pop(self._taken)
        self._taken += 1
        return ChunkTensors(tokens, ends, mask[0].view(torch.bool) if mask else None, fill_counts)

    def _raise_failed(self) -> None:
        if self._failed is not None and self._taken >= self._failed[0]:
            raise self._failed[1]

    def _feed(self, chunk: int) -> tuple[list[np.ndarray], ...]:
        rows = self._spare
        if self._failed is None:
            try:
                rows = self._read(chunk)
            except BaseException as error:
                self._failed = (chunk, error)
        self._rest[chunk] = rows.ends, rows.filled
        if not self._masked:
            return ([rows.tokens],)
        assert rows.loss_mask is not None, "a masked source returns a loss mask with every chunk"
        return [rows.tokens], [rows.loss_mask.view(np.uint8)]
