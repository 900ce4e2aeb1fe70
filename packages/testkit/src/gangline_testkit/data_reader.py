"""Conformance suite for batch readers of data sources: samples as by `sample`, from any start and on every width."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gangline.batch import Batch
from gangline.data.base import DataSource
from gangline.data.expand import expand
from gangline.data.reader import BatchReader, ReadPlace, StoredBatch
from gangline.data.sample_reader import KeptMemory, stack_samples
from gangline_testkit.suite import PartSuite

CPU = torch.device("cpu")
SIZE, MICRO = 8, 2  # samples of a step and of a microbatch
FIELDS = ("tokens", "targets", "loss_mask", "position", "document", "padding", "sample")


class BatchReaderSuite(PartSuite):
    """Base of `DataSourceSuite` with the tests of the source's batch reader."""

    def build_source(self, tmp_path: Path, *settings: str, split: str = "train") -> Any:
        """Return the source built on the suite's data. Raises NotImplementedError until an author overrides it."""
        raise NotImplementedError

    @contextmanager
    def read_batches(
        self, source: DataSource, index: int = 0, width: int = 1, micro_size: int = MICRO
    ) -> Iterator[BatchReader]:
        reader = source.open_reader(ReadPlace(index, width, SIZE, micro_size, CPU))
        try:
            yield reader
        finally:
            reader.close()

    def assert_samples(
        self, source: DataSource, batches: Sequence[StoredBatch], numbers: Sequence[int], counted: int | None = None
    ) -> None:
        """Assert that the batches hold these samples as `sample` returns them; rows from `counted` on do not count."""
        read = [int(number) for batch in batches for number in batch.sample]
        assert read == list(numbers), f"samples {read} are read; {list(numbers)} are wanted"
        for batch in batches:
            rows = batch.sample.tolist()
            reference = stack_samples([source.sample(i) for i in rows], rows, KeptMemory(CPU))
            reference.counted = counted
            _assert_equal(expand(batch, 0, CPU), expand(reference, 0, CPU), rows)

    def test_a_reader_gives_the_samples_themselves(self, tmp_path: Path) -> None:
        source = self.build_source(tmp_path)
        with self.read_batches(source) as reader:
            reader.begin(0, 0)
            for step in range(4):
                batches = list(reader.take())
                assert [len(batch.tokens) for batch in batches] == [MICRO] * (SIZE // MICRO)
                self.assert_samples(source, batches, range(step * SIZE, (step + 1) * SIZE))

    def test_a_reader_goes_on_anywhere(self, tmp_path: Path) -> None:
        """Check that a reader restarts at any sample, as after a resume, after a rollback, or to skip samples."""
        source = self.build_source(tmp_path)
        with self.read_batches(source) as reader:
            for cursor, steps in ((SIZE, 2), (5 * SIZE + 3, 1), (0, 2), (1, 1), (1, 1)):
                reader.begin(cursor, step=cursor)
                for step in range(steps):
                    first = cursor + step * SIZE
                    self.assert_samples(source, reader.take(), range(first, first + SIZE))

    def test_readers_of_every_width_share_each_batch(self, tmp_path: Path) -> None:
        source = self.build_source(tmp_path)
        for width in (2, 4, 8):
            for index in range(width):
                with self.read_batches(source, index, width, micro_size=1) as reader:
                    reader.begin(3, 1)
                    for step in range(2):
                        first = 3 + step * SIZE + index * SIZE // width
                        self.assert_samples(source, reader.take(), range(first, first + SIZE // width))

    def test_held_out_samples_are_the_same_for_every_width(self, tmp_path: Path) -> None:
        """Check that each of the first held-out samples counts once on every width; padding rows do not count."""
        source = self.build_source(tmp_path, split="validation")
        length = source.count_samples()
        count = 5 if length is None else min(5, length)
        for width in (1, 2, 4):
            read, shares = list[int](), set[int]()
            for index in range(width):
                with self.read_batches(source, index, width) as reader:
                    held_out = 0
                    for batch in reader.read_held_out(5):
                        rows = batch.sample.tolist()
                        self.assert_samples(source, [batch], rows, batch.counted)
                        read += rows if batch.counted is None else rows[: batch.counted]
                        held_out += 1
                    shares.add(held_out)
            assert read == list(range(count)), f"{width} ranks validate on samples {read}"
            assert len(shares) == 1, f"of {width} ranks some get more microbatches than others: {sorted(shares)}"

    def test_what_a_reader_gave_stays_until_the_next(self, tmp_path: Path) -> None:
        """Check that a batch's memory is not refilled before the next batch is taken, even if the step is slow."""
        source = self.build_source(tmp_path)
        with self.read_batches(source) as reader:
            reader.begin(0, 0)
            for step in range(6):
                batches = reader.take()
                time.sleep(0.02)
                self.assert_samples(source, batches, range(step * SIZE, (step + 1) * SIZE))

    def test_a_closed_reader_reads_nothing_more(self, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        source = self.build_source(tmp_path)
        with self.read_batches(source) as reader:
            reader.begin(0, 0)
            reader.take()
            reader.close()
            with pytest.raises(RuntimeError):
                assert reader.take() is None, "a batch is read after `close`"
        deadline = time.monotonic() + 60  # a thread ends after the sample that it is reading
        while (threads := set(threading.enumerate()) - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not threads, f"threads are left after `close`: {threads}"


def _assert_equal(given: Batch, wanted: Batch, numbers: list[int]) -> None:
    for name in FIELDS:
        one, other = getattr(given, name), getattr(wanted, name)
        assert (one is None) == (other is None), f"{name} of samples {numbers} is {one}; `sample` says {other}"
        if one is not None:
            assert torch.equal(one, other), f"{name} of samples {numbers} is {one}; `sample` says {other}"
    assert set(given.extra) == set(wanted.extra), f"extra of samples {numbers} is {set(given.extra)}"
    for name, one in given.extra.items():
        assert torch.equal(one, wanted.extra[name]), f"extra {name} of samples {numbers} differs"
