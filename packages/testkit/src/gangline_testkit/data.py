"""Conformance suite for data sources: pure functions of the sample number, epochs, fingerprints, errors."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from gangline.config.schema import Run
from gangline.data.base import DataSource
from gangline.data.sample import Sample
from gangline.errors import UserError
from gangline.plugin.registry import load
from gangline_testkit.claims import mark_capability
from gangline_testkit.data_reader import BatchReaderSuite
from gangline_testkit.pool import get_pool

SOME = 24  # number of samples that a test reads


def compute_digests(build: str, run: Run, split: str, numbers: list[int]) -> list[str]:
    """Return the digests of the samples with these numbers, read on this rank."""
    source = load(build)(run.data, run, split)
    return [_compute_digest(source.sample(number)) for number in numbers]


def _compute_digest(sample: Sample) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(sample.items()):
        digest.update(f"{name} {value.shape}".encode())  # type: ignore[attr-defined]
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


class DataSourceSuite(BatchReaderSuite):
    """Conformance suite for data sources; subclass it with ``choice = "data=mine"``.

    The suite of a source that reads other data than text overrides `write_corpus` and `place`.
    """

    CLAIMS: ClassVar[dict[str, str]] = {
        "epochs": "The source has a length, and one epoch reads all data once.",
        "disjoint": "No training sample contains validation data.",
        "reads": "Missing or too little data in data.path raises a user error.",
    }

    def get_model_settings(self) -> tuple[str, ...]:
        return ("model.vocab_size=256", "batch.sequence_length=32")

    def write_corpus(self, directory: Path, first: int = 0, words: int = 1500) -> tuple[str, ...]:
        """Write a text file of `words` unique numbers from `first` on, and return the settings that name the file."""
        path = directory / f"{first}-{words}.txt"
        path.write_text(self.make_text(first, words))
        return (f"data.path={path}",)

    def make_text(self, first: int = 0, words: int = 1500) -> str:
        """Return the text of `write_corpus`: numbers in counting order, so that short substrings have one position."""
        return "".join(f"{100_000 + first + n} " for n in range(words))

    def place(self, source: DataSource, sample: Sample) -> tuple[int, int]:
        """Return the range [start, stop) of the text, in characters, that contains the inputs of a sample."""
        read = source.decode(sample["tokens"][:-1].tolist())
        assert read is not None, "`decode` of the source returns None: override `place` in the suite class"
        text = self.make_text()
        while read and read not in text:  # the last sample may end in a separator
            read = read[:-1]
        assert len(read) > len("100000 "), "the decoded inputs of a sample are not a substring of the data"
        return text.index(read), text.index(read) + len(read)

    def build_source(
        self, tmp_path: Path, *settings: str, split: str = "train", corpus: Iterable[str] | None = None
    ) -> Any:
        """Return the source, built on the suite's data. corpus: settings that name other data."""
        run = self.run(*(self.write_corpus(tmp_path) if corpus is None else corpus), *settings)
        return self.build(run.data, run, split)

    # --- samples -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("split", ["train", "validation"])
    def test_samples_have_the_shapes_and_types_of_the_contract(self, split: str, tmp_path: Path) -> None:
        source = self.build_source(tmp_path, split=split)
        for i in range(SOME):
            sample = source.sample(i)
            tokens = sample["tokens"]
            assert tokens.shape == (33,), f"tokens have shape {tokens.shape}, expected T+1 = 33"
            assert np.issubdtype(tokens.dtype, np.integer)
            assert 0 <= tokens.min() <= tokens.max() < 256
            for name in ("loss_mask", "document", "position"):
                if name in sample:
                    assert sample[name].shape == (32,), f"{name} has shape {sample[name].shape}, expected T = 32"
            if "filled" in sample:
                assert sample["filled"].shape == (), f"filled has shape {sample['filled'].shape}, expected a number"
                assert 0 <= sample["filled"] <= 32
                assert not sample.get("loss_mask", np.ones(32, bool))[int(sample["filled"]) :].any()
            if "loss_mask" in sample:
                assert sample["loss_mask"].dtype == np.bool_
            if "position" in sample:
                assert sample["position"].min() >= 0
            if "document" in sample:
                steps = np.diff(sample["document"])
                assert steps.min(initial=0) >= 0, "document numbers decrease within a sequence"

    def test_sample_depends_only_on_its_number(self, tmp_path: Path) -> None:
        """Check that a sample depends only on its number, not on earlier reads or on changes of returned arrays."""
        source = self.build_source(tmp_path)
        first = [_compute_digest(source.sample(i)) for i in range(SOME)]
        for i in reversed(range(SOME)):
            sample = source.sample(i)
            for value in sample.values():
                if value.flags.writeable:
                    value[...] = 1
        assert [_compute_digest(source.sample(i)) for i in range(SOME)] == first
        another = self.build_source(tmp_path)
        assert [_compute_digest(another.sample(i)) for i in reversed(range(SOME))] == first[::-1]

    def test_every_process_reads_equal_samples(self, tmp_path: Path) -> None:
        run, numbers = self.run(*self.write_corpus(tmp_path)), [5, 0, SOME, 5]
        source = self.build(run.data, run, "train")
        here = [_compute_digest(source.sample(i)) for i in numbers]
        for answer in get_pool(2).run(compute_digests, self.offer.part.build, run, "train", numbers):
            assert answer == here

    def test_count_samples_returns_a_positive_number_or_none(self, tmp_path: Path) -> None:
        """Check that `count_samples` of each split returns a positive number, or None for an endless source."""
        for split in ("train", "validation"):
            length = self.build_source(tmp_path, split=split).count_samples()
            assert length is None or (isinstance(length, int) and length > 0), (
                f"`count_samples` of split {split} returns {length!r}"
            )

    # --- epochs ------------------------------------------------------------------------------------------------------

    def find_places(self, source: DataSource, numbers: Iterable[int]) -> list[tuple[int, int]]:
        return sorted(self.place(source, source.sample(i)) for i in numbers)

    @mark_capability("epochs")
    def test_epoch_reads_all_data_once(self, tmp_path: Path) -> None:
        """Check that an epoch reads all data once, except the end of each split if it is too short for a sample."""
        covered = []
        for split in ("train", "validation"):
            source = self.build_source(tmp_path, split=split)
            places = self.find_places(source, range(source.count_samples()))
            for (_, stop), (start, _) in itertools.pairwise(places):
                assert start >= stop, f"characters {start} to {stop} of the data are read twice in an epoch of {split}"
            covered += places
        letters = np.zeros(len(self.make_text()), dtype=bool)
        for start, stop in covered:
            letters[start:stop] = True
        assert (~letters).sum() <= 3 * 33, f"{(~letters).sum()} characters of the data are in no sample of an epoch"

    @mark_capability("epochs")
    def test_next_epoch_reads_the_same_data(self, tmp_path: Path) -> None:
        source = self.build_source(tmp_path)
        count = source.count_samples()
        assert self.find_places(source, range(count, 2 * count)) == self.find_places(source, range(count))

    @mark_capability("disjoint")
    def test_validation_data_is_not_trained_on(self, tmp_path: Path) -> None:
        train, held_out = (self.build_source(tmp_path, split=split) for split in ("train", "validation"))
        letters = np.zeros(len(self.make_text()), dtype=bool)
        for start, stop in self.find_places(train, range(train.count_samples() or SOME)):
            letters[start:stop] = True
        for start, stop in self.find_places(held_out, range(held_out.count_samples() or SOME)):
            assert not letters[start:stop].any(), f"characters {start} to {stop} are in training and validation samples"

    # --- fingerprint, state and description --------------------------------------------------------------------------

    def test_fingerprint_is_equal_for_equal_samples(self, tmp_path: Path) -> None:
        one, two = self.build_source(tmp_path), self.build_source(tmp_path)
        one.sample(3)
        assert one.compute_fingerprint() == two.compute_fingerprint() != ""

    @pytest.mark.parametrize("change", ["data", "length", "seed", "split"])
    def test_fingerprint_changes_with_the_samples(self, change: str, tmp_path: Path) -> None:
        source = self.build_source(tmp_path)
        other = {
            "data": lambda: self.build_source(tmp_path, corpus=self.write_corpus(tmp_path, first=70_000)),
            "length": lambda: self.build_source(tmp_path, "batch.sequence_length=31"),
            "seed": lambda: self.build_source(tmp_path, "run.seed=8"),
            "split": lambda: self.build_source(tmp_path, split="validation"),
        }[change]()
        same = all(_compute_digest(source.sample(i)) == _compute_digest(other.sample(i)) for i in range(SOME))
        assert same or source.compute_fingerprint() != other.compute_fingerprint(), (
            f"samples change with another {change}, and the fingerprint does not"
        )

    def test_source_state_is_json(self, tmp_path: Path) -> None:
        state = self.build_source(tmp_path).state(17)
        assert json.loads(json.dumps(state)) == state

    def test_description_is_one_line(self, tmp_path: Path) -> None:
        described = self.build_source(tmp_path).describe()
        assert described
        assert "\n" not in described

    @mark_capability("reads")
    def test_missing_data_is_a_user_error(self, tmp_path: Path) -> None:
        """Check that missing data is reported by `check`, before a run starts, or raises UserError when read."""
        run = copy.deepcopy(self.run(*self.write_corpus(tmp_path)))
        for setting in self.write_corpus(tmp_path):
            path = Path(setting.partition("=")[2])
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not run.data.check(run):
            with pytest.raises(UserError):
                self.build(run.data, run, "train").sample(0)

    @mark_capability("reads")
    def test_too_little_data_is_a_user_error(self, tmp_path: Path) -> None:
        run = self.run(*self.write_corpus(tmp_path, words=2))
        if not run.data.check(run):
            with pytest.raises(UserError):
                self.build(run.data, run, "train").sample(0)
