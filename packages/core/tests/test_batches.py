"""Which samples a rank reads: the same global batch on every layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from gangline.data import DataSource
from gangline.parallel.microbatch import count_on_host
from gangline.train.batches import Batches, collate


class Counting(DataSource):
    """Sample i holds i, i+1, ...: what a batch read shows in its tokens."""

    def sample(self, i):
        return {"tokens": np.arange(i, i + 5)}

    def __init__(self, length=100):
        self.samples = length

    def length(self):
        return self.samples

    def fingerprint(self):
        return "counting"


def batches(global_size, micro, index, width, length=100):
    return Batches(Counting(length), global_size, micro, (index, width), torch.device("cpu"))


def test_a_batch_that_leaves_the_host_is_counted_on_its_way():
    """Afterwards its mask lies where the host would have to wait for it: on the meta device for ever."""
    (batch,) = Batches(Counting(), 2, 2, (0, 1), torch.device("cpu")).take(0, step=0)
    batch.loss_mask[0, 1:] = False
    there = batch.to("meta")
    assert there.valid == 5
    assert there.to("meta").valid == 5
    assert batch.to("cpu").valid is None
    assert count_on_host([batch, there]).tolist() == [10]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1000))
def test_every_layout_reads_the_same_samples_once_and_in_order(width, accumulation, micro, cursor):
    size = width * accumulation * micro
    read = [
        int(number)
        for index in range(width)
        for batch in batches(size, micro, index, width).take(cursor, step=3)
        for number in batch.sample
    ]
    assert read == list(range(cursor, cursor + size))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30), st.sampled_from([None, 7, 100]))
def test_validation_counts_each_sample_once_on_every_layout(width, micro, count, length):
    shares = [batches(width * micro, micro, index, width, length).held_out(count) for index in range(width)]
    assert len({len(share) for share in shares}) == 1, "a pipeline needs the same number of microbatches everywhere"
    counted = [int(b.sample[row]) for share in shares for b in share for row in range(micro) if b.loss_mask[row].any()]
    assert sorted(counted) == list(range(min(count, length or count)))


def test_targets_are_the_next_tokens():
    (batch,) = batches(2, 2, 0, 1).take(10, step=1)
    assert torch.equal(batch.targets[:, :-1], batch.tokens[:, 1:])
    assert batch.tokens.tolist() == [[10, 11, 12, 13], [11, 12, 13, 14]]
    assert batch.document is None
    assert batch.position.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.loss_mask.all()
    assert batch.step == 1


def test_masks_documents_and_positions_come_from_the_sample():
    first = {
        "tokens": np.arange(5, dtype=np.uint8),
        "loss_mask": np.array([1, 0, 1, 1], dtype=bool),
        "document": np.array([0, 0, 1, 1]),
        "position": np.array([0, 1, 0, 1]),
    }
    batch = collate([first, {"tokens": np.arange(5, dtype=np.uint8)}], [7, 8], step=0)
    assert batch.tokens.dtype == torch.int64
    assert batch.loss_mask.tolist() == [[True, False, True, True], [True] * 4]
    assert batch.document.tolist() == [[0, 0, 1, 1], [0] * 4]
    assert batch.position.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    assert batch.sample.tolist() == [7, 8]


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="do not divide"):
        batches(6, 4, 0, 1)
    with pytest.raises(ValueError, match="do not divide"):
        batches(5, 1, 0, 2)
