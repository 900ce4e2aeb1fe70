"""Prefetch of batches: order, slots, waits, errors, and threads that `close` ends."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gangline.data import read_ahead
from gangline.data.base import DataSource
from gangline.data.read_ahead import ReadAhead
from gangline.data.reader import ReadPlace
from gangline.mesh import Mesh
from gangline.train.batches import Batches
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

CPU = torch.device("cpu")


@pytest.fixture
def ours():
    """Return a function that lists the reader threads of this test; threads of other tests may still run."""
    before = set(threading.enumerate())

    def begun():
        return [one for one in threading.enumerate() if one.name.startswith("read-ahead") and one not in before]

    return begun


def soon(holds: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true within 60 s."""
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.002)
    return holds()


def test_results_come_in_order_from_several_threads():
    def make(n, slot):
        time.sleep(0.002 * (n % 3))
        return n

    ahead = ReadAhead(make, slots=5, threads=4)
    assert [ahead.take() for _ in range(30)] == list(range(30))
    ahead.close()


def test_slot_is_not_reused_before_next_take():
    slots = [None] * 3

    def make(n, slot):
        slots[slot] = n
        return slot

    ahead = ReadAhead(make, slots=3)
    for n in range(40):
        slot = ahead.take()
        time.sleep(0.001)
        assert slots[slot] == n
    ahead.close()


def test_prefetch_stops_at_slot_count():
    begun = []
    ahead = ReadAhead(lambda n, slot: begun.append(n), slots=3)
    ahead.take()
    assert soon(lambda: len(begun) >= 3)
    time.sleep(0.02)
    assert begun == [0, 1, 2]
    ahead.close()


def test_prefetch_error_is_raised_in_order():
    def make(n, slot):
        if n == 2:
            raise OSError("the disk is gone")
        return n

    ahead = ReadAhead(make, slots=4)
    assert [ahead.take(), ahead.take()] == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone") as raised:
            ahead.take()
    assert "make" in [entry.name for entry in raised.traceback]
    ahead.close()


def test_error_in_thread_setup_is_raised():
    def prepare():
        raise OSError("no such device")

    ahead = ReadAhead(lambda n, slot: n, slots=3, threads=2, prepare=prepare)
    never = threading.Timer(60, ahead.close)
    never.start()
    for _ in range(2):
        with pytest.raises(OSError, match="no such device"):
            ahead.take()
    never.cancel()
    ahead.close()


def test_close_timeout_is_shared_by_threads(monkeypatch):
    """Use a clock that advances only while `close` joins a thread."""
    waited = [0.0]
    going = threading.Event()
    ahead = ReadAhead(lambda n, slot: going.wait(60), slots=40, threads=40)
    with monkeypatch.context() as patch:
        patch.setattr(read_ahead, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
        patch.setattr(threading.Thread, "join", lambda thread, timeout: waited.append(timeout))
        ahead.close()
    going.set()
    assert len(waited) == 1 + 40
    assert sum(waited) == read_ahead.PATIENCE, "40 threads that hang would take 200 s in turn"


def test_close_ends_threads_and_waiting_take(ours):
    going = threading.Event()

    def make(n, slot):
        going.wait(60)
        return n

    ahead = ReadAhead(make, slots=2, threads=2)
    threading.Timer(0.05, lambda: (going.set(), ahead.close())).start()
    with pytest.raises(RuntimeError, match="closed"):
        list(iter(ahead.take, "never"))
    assert soon(lambda: not ours())


class Slow(DataSource):
    """Data source that takes a while for each sample, as a disk does."""

    threads = 4

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []

    def sample(self, i):
        self.asked.append(i)
        time.sleep(self.seconds)
        if i >= 64:
            raise LookupError(f"there is no sample {i}")
        return {"tokens": np.arange(i, i + 5, dtype=np.uint16)}

    def count_samples(self):
        return None

    def compute_fingerprint(self):
        return "slow"


class Gated(Slow):
    """Data source that refuses samples after `shut` is set."""

    def __init__(self):
        super().__init__(0.001)
        self.given, self.shut = [], False

    def sample(self, i):
        if self.shut:
            raise LookupError(f"sample {i} is asked for too late")
        found = super().sample(i)
        self.given.append(i)
        return found


def test_next_batch_is_read_during_step():
    """Refuse samples once the next batch has been read, so that the next step must use the prefetched batch."""
    source = Gated()
    batches = Batches(source, ReadPlace(0, 1, 4, 4, CPU))
    for step in range(3):
        (batch,) = batches.take(4 * step, step)
        assert batch.sample.tolist() == list(range(4 * step, 4 * step + 4))
        ahead = {*range(4 * step + 4, 4 * step + 8)}
        assert soon(lambda: ahead <= {*source.given})  # noqa: B023  # called here, and not later
    source.shut = True
    (batch,) = batches.take(12, 3)
    assert batch.sample.tolist() == [12, 13, 14, 15]
    batches.close()


def test_cursor_jump_discards_prefetched_samples(ours):
    """Move the cursor as a rollback or skipped samples do: batches prefetched for the old cursor are dropped."""
    source = Slow(0.0)
    batches = Batches(source, ReadPlace(0, 1, 2, 1, CPU))
    seen = [
        int(b.sample[0])
        for cursor, step in [(0, 0), (2, 1), (30, 2), (32, 3), (2, 1)]
        for b in batches.take(cursor, step)
    ]
    assert seen == [0, 1, 2, 3, 30, 31, 32, 33, 2, 3]
    batches.close()
    assert soon(lambda: not ours())


class Hanging(Slow):
    """Data source whose samples below 100 wait for an event."""

    def __init__(self):
        super().__init__(0.0)
        self.going = threading.Event()

    def sample(self, i):
        self.asked.append(i)
        if i < 100:
            self.going.wait(60)
        return {"tokens": np.arange(i, i + 5, dtype=np.uint16), "pixels": np.full(2, i)}


def test_late_read_does_not_overwrite_new_samples(monkeypatch, ours):
    """Use a thread that waits for its storage longer than `begin` waits for the thread."""
    monkeypatch.setattr(read_ahead, "PATIENCE", 0.01)
    source = Hanging()
    reader = source.open_reader(ReadPlace(0, 1, 2, 2, CPU))
    reader.begin(0, 0)
    late = ours()
    reader.begin(100, 0)
    (batch,) = reader.take()
    source.going.set()
    for thread in late:
        thread.join(60)
    assert batch.sample.tolist() == batch.tokens[:, 0].tolist() == batch.extra["pixels"][:, 0].tolist() == [100, 101]
    reader.close()


def test_sample_error_is_raised_at_its_step():
    batches = Batches(Slow(0.0), ReadPlace(0, 1, 32, 8, CPU))
    batches.take(0, 0)
    batches.take(32, 1)
    with pytest.raises(LookupError, match="no sample 64"):
        batches.take(64, 2)
    batches.close()


def test_a_closed_reader_reads_nothing_more():
    source = Slow(0.0)
    reader = source.open_reader(ReadPlace(0, 1, 2, 2, CPU))
    with pytest.raises(RuntimeError, match="call `begin` before"):
        reader.take()
    reader.begin(0, 0)
    reader.take()
    reader.close()
    reader.close()
    asked = len(source.asked)
    for call in (reader.take, lambda: reader.begin(0, 0), lambda: list(reader.read_held_out(2))):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    time.sleep(0.02)
    assert len(source.asked) == asked


class Shared(Slow):
    """Data source with documents and pixels, which one rank reads for its peers."""

    shared = True

    def sample(self, i):
        more = {"document": np.array([0, 0, 1, 1]), "pixels": np.full((2, 2), i, np.float32)}
        return super().sample(i) | (more if i % 4 < 2 else more | {"document": np.array([0, 1, 1, 2])})


def read_by_one(broken: bool) -> list:
    """Return this rank's batches and whether it read samples, or the message of the error."""
    source = Shared(0.0)
    world = rank.make_comms(Mesh.of({"tp": rank.world})).world
    batches = Batches(source, ReadPlace(0, 1, 4, 2, CPU), world)
    found = []
    try:
        for step in range(3):
            found += batches.take(32 * step if broken else 4 * step, step)
        found += batches.read_held_out(3)
    except Exception as error:
        return [str(error)]
    finally:
        batches.close()
    fields = ("tokens", "targets", "loss_mask", "position", "document", "sample", "ends")
    values = [[getattr(batch, name).tolist() for name in fields] for batch in found]
    pixels = [batch.extra["pixels"].tolist() for batch in found]
    return [values, pixels, bool(source.asked)]


def test_peers_receive_batches_of_reading_rank():
    alone = Batches(Shared(0.0), ReadPlace(0, 1, 4, 2, CPU))
    wanted = [batch.tokens.tolist() for step in range(3) for batch in alone.take(4 * step, step)]
    wanted += [batch.tokens.tolist() for batch in alone.read_held_out(3)]
    alone.close()
    first, *others = get_pool(3).run(read_by_one, False)
    assert [value[0] for value in first[0]] == wanted
    assert [each[:2] for each in others] == [first[:2]] * 2
    assert [first[2], *(each[2] for each in others)] == [True, False, False]


def test_error_of_reading_rank_reaches_peers():
    for told in get_pool(3).run(read_by_one, True):
        assert "there is no sample 64" in told[0]


class NothingHeldOut(Shared):
    """Data source whose reader raises an error when held-out batches are requested."""

    def open_reader(self, place):
        reader = super().open_reader(place)

        def read_held_out(count):
            raise OSError("the disk is gone")

        reader.read_held_out = read_held_out
        return reader


def held_out_by_one() -> str:
    world = rank.make_comms(Mesh.of({"tp": rank.world})).world
    batches = Batches(NothingHeldOut(0.0), ReadPlace(0, 1, 4, 2, CPU), world)
    try:
        batches.read_held_out(3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        batches.close()
    return "nothing"


def test_held_out_read_error_reaches_peers():
    first, *others = get_pool(3).run(held_out_by_one)
    assert first == "OSError: the disk is gone"
    assert others == ["PeerFailed: the rank that reads the batches of this rank failed: OSError: the disk is gone"] * 2
