"""A batch goes to the device without a wait of the host, whatever it holds, and is the batch of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layouts import CPU, CUDA

from gangline.data.expand import expand
from gangline.data.sample_reader import KeptMemory, stack_samples
from gangline_testkit.fake_cuda.watch import Watch

FIELDS = {
    "document": np.array([0, 0, 1, 1, 2]),
    "position": np.array([3, 4, 0, 1, 0]),
    "restarting": np.array([0, 1, 0, 1, 0]),
    "filled": 4,
    "loss_mask": np.array([1, 1, 0, 1, 0], bool),
    "patches": np.ones((2, 3), np.float32),
}


@pytest.mark.parametrize(
    "names", [(), ("restarting",), ("document", "position", "filled", "loss_mask", "patches")], ids=len
)
def test_a_batch_is_copied_without_a_wait(names: tuple[str, ...]) -> None:
    fields = {name.replace("restarting", "position"): FIELDS[name] for name in names}
    sample = {"tokens": np.arange(6, dtype=np.uint16), **fields}
    stored = stack_samples([sample, sample], (7, 8), KeptMemory(CPU))
    with Watch() as watch:
        batch = expand(stored, 0, CUDA)
    assert not watch.waits
    host = expand(stored, 0, CPU)
    for name in ("tokens", "targets", "sample", "document", "position", "padding", "loss_mask"):
        there, here = getattr(batch, name), getattr(host, name)
        assert here is there is None or (there.device == CUDA and torch.equal(there.cpu(), here))
    assert {name: x.device for name, x in batch.extra.items()} == dict.fromkeys(host.extra, CUDA)
