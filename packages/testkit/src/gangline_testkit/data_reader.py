"""Conformance suite for batch readers of data sources: equal samples for any start and any data-parallel width."""

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
SIZE, MICRO = 8, 2  # number of samples of a step and of a microbatch
FIELDS = ("tokens", "targets", "loss_mask", "position", "document", "padding", "sample")


class BatchReaderSuite(PartSuite):
    """Base class of `DataSourceSuite`, with the tests of batch readers."""

    def build_source(self, tmp_path: Path, *settings: str, split: str = "train") -> Any:
        """Return the source, built on the suite's data. Raises NotImplementedError unless a subclass overrides it."""
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
        """Assert that the batches contain these samples as `sample` returns them.

        counted: number of rows before the padding rows.
        """
        read = [int(number) for batch in batches for number in batch.sample]
        assert read == list(numbers), f"the reader returned samples {read}, expected {list(numbers)}"
        for batch in batches:
            rows = batch.sample.tolist()
            reference = stack_samples([source.sample(i) for i in rows], rows, KeptMemory(CPU))
            reference.counted = counted
            _assert_equal(expand(batch, 0, CPU), expand(reference, 0, CPU), rows)

    def test_reader_returns_the_samples_of_the_source(self, tmp_path: Path) -> None:
        source = self.build_source(tmp_path)
        with self.read_batches(source) as reader:
            reader.begin(0, 0)
            for step in range(4):
                batches = list(reader.take())
                assert [len(batch.tokens) for batch in batches] == [MICRO] * (SIZE // MICRO)
                self.assert_samples(source, batches, range(step * SIZE, (step + 1) * SIZE))

    def test_reader_restarts_at_any_sample(self, tmp_path: Path) -> None:
        """Check that `begin` restarts a reader at any sample, as for a resume, a rollback or skipped samples."""
        source = self.build_source(tmp_path)
        with self.read_batches(source) as reader:
            for cursor, steps in ((SIZE, 2), (5 * SIZE + 3, 1), (0, 2), (1, 1), (1, 1)):
                reader.begin(cursor, step=cursor)
                for step in range(steps):
                    first = cursor + step * SIZE
                    self.assert_samples(source, reader.take(), range(first, first + SIZE))

    def test_readers_of_every_width_split_each_batch(self, tmp_path: Path) -> None:
        source = self.build_source(tmp_path)
        for width in (2, 4, 8):
            for index in range(width):
                with self.read_batches(source, index, width, micro_size=1) as reader:
                    reader.begin(3, 1)
                    for step in range(2):
                        first = 3 + step * SIZE + index * SIZE // width
                        self.assert_samples(source, reader.take(), range(first, first + SIZE // width))

    def test_validation_samples_are_equal_for_every_width(self, tmp_path: Path) -> None:
        """Check that validation reads each of the first samples once at every width; padding rows do not count."""
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
            assert read == list(range(count)), (
                f"{width} data ranks validate on samples {read}, expected 0 to {count - 1}"
            )
            assert len(shares) == 1, (
                f"the {width} data ranks have different numbers of validation microbatches: {sorted(shares)}"
            )

    def test_batch_is_unchanged_until_the_next_is_taken(self, tmp_path: Path) -> None:
        """Check that prefetching does not overwrite a batch before the next `take`, even during a slow step."""
        source = self.build_source(tmp_path)
        with self.read_batches(source) as reader:
            reader.begin(0, 0)
            for step in range(6):
                batches = reader.take()
                time.sleep(0.02)
                self.assert_samples(source, batches, range(step * SIZE, (step + 1) * SIZE))

    def test_closed_reader_stops_reading(self, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        source = self.build_source(tmp_path)
        with self.read_batches(source) as reader:
            reader.begin(0, 0)
            reader.take()
            reader.close()
            with pytest.raises(RuntimeError):
                assert reader.take() is None, "`take` returned batches after `close`"
        deadline = time.monotonic() + 60  # threads of the reader end after their current sample
        while (threads := set(threading.enumerate()) - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not threads, f"reader threads are alive 60 s after `close`: {threads}"


def _assert_equal(given: Batch, wanted: Batch, numbers: list[int]) -> None:
    for name in FIELDS:
        one, other = getattr(given, name), getattr(wanted, name)
        assert (one is None) == (other is None), (
            f"samples {numbers}: {name} of the batch is {one}, and `sample` returns {other}"
        )
        if one is not None:
            assert torch.equal(one, other), (
                f"samples {numbers}: {name} of the batch is {one}, and `sample` returns {other}"
            )
    assert set(given.extra) == set(wanted.extra), (
        f"samples {numbers}: the batch has the extra fields {set(given.extra)}, expected {set(wanted.extra)}"
    )
    for name, one in given.extra.items():
        assert torch.equal(one, wanted.extra[name]), f"samples {numbers}: the extra field {name} differs from `sample`"
