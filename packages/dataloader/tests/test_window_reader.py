"""Window reader of complete batches: equal to reading single samples, across shards, stores, epochs and seeks."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from gangline.data import read_ahead
from gangline.data.expand import expand
from gangline.data.reader import ReadPlace
from gangline.data.sample_reader import KeptMemory, SampleReader, stack_samples
from gangline.errors import UserError
from gangline_dataloader.order.mixture import Ingredient, MixtureOrder, WeightStage
from gangline_dataloader.order.single import SingleOrder
from gangline_dataloader.sources.changing import GrowingWindowSource, MixedWindowSource
from gangline_dataloader.sources.mixture import TrainOrder
from gangline_dataloader.sources.split import SplitRows
from gangline_dataloader.store.tokens import Sharded

CPU = torch.device("cpu")
T = 5


class Memory(Sharded):
    """Shards in memory with documents of any length; each shard ends with a document."""

    def __init__(self, lengths, seed=0, documents=True):
        draws = np.random.default_rng(seed)
        self.shards = [draws.integers(0, 60_000, n).astype(np.uint16) for n in lengths]
        self.endings = [
            np.unique(np.append(draws.integers(1, n + 1, max(1, n // 4)), n)).astype(np.uint32) for n in lengths
        ]
        self.known = documents
        super().__init__(
            lengths, np.dtype(np.uint16), vocab_size=60_000, end_of_text=0, identity=f"{seed}", documents=None
        )

    def open(self, shard):
        return self.shards[shard]

    def open_ends(self, shard):
        return self.endings[shard] if self.known else None


def source_of(stores, order, documents=True):
    parts = [SplitRows(str(k), store, np.array([0]), np.array([store.count_rows(T)])) for k, store in enumerate(stores)]
    identity = ("here",)
    kind = GrowingWindowSource if len(stores) == 1 else MixedWindowSource
    return kind(parts, order, None, sequence_length=T, documents=documents, identity=identity, samples=None)


def single(lengths, documents=True):
    store = Memory(lengths, documents=documents)
    return source_of([store], SingleOrder(Ingredient("0", store.count_rows(T)), 7, "train"), documents)


def mixed(epochs=None):
    stores = [Memory([40, 3, 90], 1), Memory([25] * 6, 2)]
    ingredients = [Ingredient(str(k), store.count_rows(T), None, epochs) for k, store in enumerate(stores)]
    return source_of(stores, TrainOrder(MixtureOrder(ingredients, [WeightStage(0, (0.7, 0.3))], 7)))


def assert_same(given_, wanted):
    for one, other in zip(given_, wanted, strict=True):
        assert one.tokens.dtype == torch.uint16
        mine, theirs = expand(one, 0, CPU), expand(other, 0, CPU)
        for name in ("tokens", "targets", "loss_mask", "position", "document", "sample", "ends"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert a is b is None or torch.equal(a, b), name


def samples(source, numbers):
    return stack_samples([source.sample(i) for i in numbers], numbers, KeptMemory(CPU))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_batches_equal_single_samples(data):
    """Check windows that span two or three shards, documents that end with the window, and several chunks."""
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6).filter(lambda n: sum(n) > T))
    source = single(lengths, data.draw(st.booleans()))
    width, micro, accumulation = (data.draw(st.integers(1, 3)) for _ in range(3))
    place = ReadPlace(data.draw(st.integers(0, width - 1)), width, width * micro * accumulation, micro, CPU)
    reader = source.open_reader(place)
    reader.steps = data.draw(st.sampled_from([1, 2, 4]))
    cursor = data.draw(st.integers(0, 10**9))
    reader.begin(cursor, 0)
    for step in range(9):
        first = place.find_first(cursor + step * place.global_size)
        wanted = [samples(source, range(at, at + micro)) for at in range(first, first + place.share, micro)]
        assert_same(reader.take(), wanted)
    reader.close()


def test_mixture_batches_equal_sample_reader_batches():
    source = mixed()
    reader, other = source.open_reader(ReadPlace(1, 2, 12, 3, CPU)), SampleReader(source, ReadPlace(1, 2, 12, 3, CPU))
    for cursor in (0, 65_530):  # the second cursor crosses a block boundary
        reader.begin(cursor, 0)
        other.begin(cursor, 0)
        for _ in range(6):
            assert_same(reader.take(), other.take())
    reader.close()
    other.close()


def test_reader_raises_at_first_incomplete_step():
    source = mixed(epochs=1)
    whole, chunks = divmod(source.order.end, 4)
    assert chunks, "the last step has to be one that is not full"
    reader = source.open_reader(ReadPlace(0, 1, 4, 4, CPU))
    reader.steps = 4
    reader.begin(0, 0)
    for step in range(whole):
        assert_same(reader.take(), [samples(source, range(4 * step, 4 * step + 4))])
    for _ in range(2):
        with pytest.raises(UserError, match=f"ends after {source.order.end} samples"):
            reader.take()
    reader.close()


def test_document_search_does_not_copy_ends(monkeypatch):
    """Check the dtype of the search: with another dtype, numpy would copy all document ends of a shard."""
    source = single([2000])
    searched = []
    search = np.searchsorted
    monkeypatch.setattr(np, "searchsorted", lambda a, v, **k: (searched.append((a, v)), search(a, v, **k))[1])
    source.sample(3)
    reader = source.open_reader(ReadPlace(0, 1, 4, 4, CPU))
    reader.begin(0, 0)
    reader.take()
    reader.close()
    ends = source.stores[0].endings[0]
    needles = [v for a, v in searched if a is ends]
    assert needles
    assert all(np.asarray(v).dtype == ends.dtype for v in needles)


def test_slow_read_does_not_overwrite_batches_after_seek(monkeypatch):
    """Keep the reader thread waiting for its shard for longer than `begin` waits for the thread."""
    monkeypatch.setattr(read_ahead, "PATIENCE", 0.01)
    source, going, late = single([2000]), threading.Event(), []
    fill = source.fill

    def fill_when_told(numbers, *more):
        if numbers[0] < 100:
            late.append(threading.current_thread())
            going.wait(60)
        return fill(numbers, *more)

    source.fill = fill_when_told
    reader = source.open_reader(ReadPlace(0, 1, 4, 4, CPU))
    reader.begin(0, 0)
    while not late:
        time.sleep(0.001)
    reader.begin(100, 0)
    batches = reader.take()
    going.set()
    late[0].join(60)
    assert_same(batches, [samples(source, range(100, 104))])
    reader.close()


def test_lookup_of_replaced_sample_order_is_not_cached():
    """Change the order during a lookup, as a rollback to a checkpoint from before a grown corpus does."""
    source, asked, going = single([2000]), threading.Event(), threading.Event()
    before = source.order

    class Slow:
        end = None

        def __call__(self, numbers):
            asked.set()
            going.wait(60)
            return before(numbers)

    source.order = Slow()
    reading = threading.Thread(target=source.sample, args=(0,))
    reading.start()
    asked.wait(60)
    after = SingleOrder(Ingredient("0", source.stores[0].count_rows(T)), 8, "train")
    source.change_order(after)
    going.set()
    reading.join(60)
    wanted = after(np.arange(8)).row
    assert [source.locate_sample(i)[1] for i in range(8)] == wanted.tolist() != before(np.arange(8)).row.tolist()


def test_unreadable_step_raises_on_every_later_take():
    """Fail one step of several that are read together: steps before it are given, and none after it."""
    source = single([2000])
    fill = source.fill

    def fill_but_one(numbers, *more):
        if 45 in numbers:
            raise UserError("the disk is gone")
        return fill(numbers, *more)

    source.fill = fill_but_one
    reader = source.open_reader(ReadPlace(0, 1, 4, 2, CPU))
    reader.steps = 8
    reader.begin(0, 0)
    for step in range(11):
        assert_same(reader.take(), [samples(source, range(at, at + 2)) for at in (4 * step, 4 * step + 2)])
    for _ in range(3):
        with pytest.raises(UserError, match="the disk is gone"):
            reader.take()
    reader.close()
