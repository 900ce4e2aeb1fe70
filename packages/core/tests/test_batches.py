"""Samples of each rank and fields of its batches: the same global batch on every layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from gangline.batch import Batch
from gangline.data.base import DataSource
from gangline.data.expand import count, expand
from gangline.data.reader import ReadPlace
from gangline.data.sample_reader import KeptMemory, stack_samples
from gangline.train.batches import Batches
from gangline_basics.parallel.microbatch import count_on_host

CPU = torch.device("cpu")


class Counting(DataSource):
    """Data source whose sample i holds the tokens i, i+1, ..., so that tokens identify their sample."""

    def sample(self, i):
        return {"tokens": np.arange(i, i + 5)}

    def __init__(self, length=100):
        self.samples = length

    def count_samples(self):
        return self.samples

    def compute_fingerprint(self):
        return "counting"


def batches(global_size, micro, index, width, length=100):
    return Batches(Counting(length), ReadPlace(index, width, global_size, micro, CPU))


def taken(global_size, micro, index, width, cursor, step):
    read = batches(global_size, micro, index, width)
    found = read.take(cursor, step)
    read.close()
    return found


def made(samples, numbers=(7, 8)) -> Batch:
    return expand(stack_samples(samples, numbers, KeptMemory(CPU)), 0, CPU)


def test_valid_tokens_are_counted_before_device_copy():
    """Count before the copy, because the host would wait for a mask on the device, and forever on the meta device."""
    (batch,) = taken(2, 2, 0, 1, 0, step=0)
    batch.loss_mask[0, 1:] = False
    there = batch.to("meta")
    assert there.valid == 5
    assert there.to("meta").valid == 5
    assert batch.to("cpu").valid is None
    assert count_on_host([batch, there]).tolist() == [10]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1000))
def test_every_layout_reads_same_samples_in_order(width, accumulation, micro, cursor):
    size = width * accumulation * micro
    read = [
        int(number)
        for index in range(width)
        for batch in taken(size, micro, index, width, cursor, step=3)
        for number in batch.sample
    ]
    assert read == list(range(cursor, cursor + size))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30), st.sampled_from([None, 7, 100]))
def test_validation_counts_each_sample_once_on_every_layout(width, micro, count, length):
    shares = [batches(width * micro, micro, index, width, length).read_held_out(count) for index in range(width)]
    assert len({len(share) for share in shares}) == 1, "a pipeline needs the same number of microbatches everywhere"
    counted = [int(b.sample[row]) for share in shares for b in share for row in range(micro) if b.loss_mask[row].any()]
    assert sorted(counted) == list(range(min(count, length or count)))


def test_targets_are_the_next_tokens():
    (batch,) = taken(2, 2, 0, 1, 10, step=1)
    assert torch.equal(batch.targets[:, :-1], batch.tokens[:, 1:])
    assert batch.tokens.tolist() == [[10, 11, 12, 13], [11, 12, 13, 14]]
    assert batch.document is None
    assert batch.ends is None
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
    batch = made([first, {"tokens": np.arange(5, dtype=np.uint8)}])
    assert batch.tokens.dtype == torch.int64
    assert batch.loss_mask.tolist() == [[True, False, True, True], [True] * 4]
    assert batch.document.tolist() == [[0, 0, 1, 1], [0] * 4]
    assert batch.position.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    assert batch.sample.tolist() == [7, 8]
    assert batch.ends.tolist() == [2, 4, 8]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_arbitrary_documents_and_positions_are_kept(data):
    """Use document numbers with gaps, and positions that continue an earlier sequence."""
    T = 6
    steps = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=T, max_size=T), min_size=1, max_size=3))
    document = np.cumsum(np.array(steps), axis=1)
    position = np.array(
        data.draw(
            st.lists(st.lists(st.integers(0, 9), min_size=T, max_size=T), min_size=len(steps), max_size=len(steps))
        )
    )
    tokens = np.arange(T + 1, dtype=np.uint16)
    batch = made(
        [{"tokens": tokens, "document": d, "position": p} for d, p in zip(document, position, strict=True)],
        range(len(steps)),
    )
    assert batch.document.tolist() == document.tolist()
    assert batch.position.tolist() == position.tolist()
    assert batch.loss_mask.all()
    borders = {b * T + t for b, row in enumerate(document) for t in range(1, T) if row[t] != row[t - 1]}
    assert batch.ends.tolist() == sorted(borders | {T * (b + 1) for b in range(len(steps))})


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_documents_positions_and_masks_follow_from_ends(data):
    """Mask the last target of each document, also at the end of a sequence, because it belongs to the next document."""
    B, T = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    ends = sorted(data.draw(st.sets(st.integers(1, B * T))))
    stored = stack_samples([{"tokens": np.zeros(T + 1, np.uint16)}] * B, range(B), KeptMemory(CPU))
    stored.ends = torch.tensor(ends, dtype=torch.int32)
    stored.counted = data.draw(st.sampled_from([None, 0, 1, B]))
    batch = expand(stored, 0, CPU)
    for b in range(B):
        number = place = 0
        for t in range(T):
            if b * T + t in ends and t:
                number, place = number + 1, 0
            assert (int(batch.document[b, t]), int(batch.position[b, t])) == (number, place)
            counts = b * T + t + 1 not in ends and (stored.counted is None or b < stored.counted)
            assert bool(batch.loss_mask[b, t]) == counts
            place += 1
    assert count(stored) == int(batch.loss_mask.sum())


def test_batch_does_not_share_reader_memory():
    """Fill the reader's memory again; its tokens have the dtype of the batch, so that no conversion copies them."""
    source = batches(2, 2, 0, 1)
    (first,) = source.take(0, 0)
    for step in range(1, 6):
        source.take(2 * step, step)
    assert first.tokens.tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
    source.close()


def test_extra_fields_are_stacked_in_batch_extra():
    pixels = [np.full((3, 2), i, dtype=np.float32) for i in range(2)]
    batch = made([{"tokens": np.arange(5), "pixels": each} for each in pixels])
    assert torch.equal(batch.extra["pixels"], torch.stack([torch.zeros(3, 2), torch.ones(3, 2)]))
    assert batch.to("meta").extra["pixels"].device.type == "meta"
    with pytest.raises(ValueError, match="sample 8 lacks the field 'pixels'"):
        made([{"tokens": np.arange(5), "pixels": pixels[0]}, {"tokens": np.arange(5)}])
    with pytest.raises(ValueError, match="one shape"):
        made([{"tokens": np.arange(5), "pixels": pixels[0]}, {"tokens": np.arange(5), "pixels": pixels[1][:2]}])


def test_indivisible_global_batch_is_refused():
    with pytest.raises(ValueError, match="is not divisible into"):
        batches(6, 4, 0, 1)
    with pytest.raises(ValueError, match="is not divisible into"):
        batches(5, 1, 0, 2)
