"""`data=dali`: batches equal those of `data=tokens`, in the same order, from buffers of DALI."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gangline.config.check import find_problems
from gangline.data.reader import ReadPlace, StoredBatch
from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.sources import build
from gangline_testkit.runs import build_small_run

pytest.importorskip("nvidia.dali", reason="the extra [dali] is not installed")
from gangline_dataloader.dali.source import build_dali

SIZES = ("model.vocab_size=256", "batch.sequence_length=48", "batch.global_size=12", "validate.every=10")
FORMS = {
    "windows": (),
    "documents": ("data.document_masking=true",),
    "packed": ("data.packing=best_fit",),
    "packed documents": ("data.packing=best_fit", "data.document_masking=true"),
}


@pytest.fixture
def store(texts, make_store) -> Path:
    folder = make_store(texts, clean=(), shard_tokens=4000, validation=0.2)
    assert commands.main(["prepare", "--out", str(folder), "--pack", "48"]) == 0
    return folder


def sources(store: Path, form: str, split: str = "train"):
    """Return the sources (data=dali, data=tokens) of the same options."""
    asked = (*SIZES, *FORMS[form], f"data.path={store}")
    ours, theirs = build_small_run(*asked, "data=dali"), build_small_run(*asked, "data=tokens")
    assert find_problems(ours) == []
    return build_dali(ours.data, ours, split), build.build_tokens(theirs.data, theirs, split)


def place(index: int = 0, width: int = 1, micro: int = 2) -> ReadPlace:
    return ReadPlace(index, width, 12, micro, torch.device("cpu"))


def content(batches: list[StoredBatch]) -> list[tuple]:
    """Return all tensors of microbatches, as bytes."""
    names = ("tokens", "sample", "ends", "loss_mask", "document", "position")
    found = []
    for one in batches:
        assert not one.extra
        tensors = [getattr(one, name) for name in names]
        arrays = [None if x is None else (str(x.dtype), tuple(x.shape), x.numpy().tobytes()) for x in tensors]
        found.append((*arrays, one.counted))
    return found


def by_sample(source, numbers: list[int]) -> list[np.ndarray]:
    return [source.sample(i)["tokens"] for i in numbers]


@pytest.mark.parametrize("form", FORMS)
def test_dali_batches_match_token_reader_bitwise(form, store):
    """Compare batches over more than an epoch, from several cursors, after jumps, for shares of several widths."""
    ours, theirs = sources(store, form)
    assert ours.compute_fingerprint() == theirs.compute_fingerprint()
    for index, width, micro in [(0, 1, 12), (0, 2, 3), (1, 2, 2), (2, 3, 4)]:
        here = place(index, width, micro)
        mine, reference = ours.open_reader(here), theirs.open_reader(here)
        for cursor in (0, 24, 24, 7, ours.count_samples() * 3 + 5):
            mine.begin(cursor, 3)
            reference.begin(cursor, 3)
            for _ in range(4):
                assert content(mine.take()) == content(reference.take())
        mine.close()
        reference.close()


@pytest.mark.parametrize("form", FORMS)
def test_dali_validation_batches_match_token_reader(form, store):
    ours, theirs = sources(store, form, "validation")
    for count in (5, 10_000):
        here = place(0, 2)
        mine, reference = ours.open_reader(here), theirs.open_reader(here)
        pairs = zip(mine.read_held_out(count), reference.read_held_out(count), strict=True)
        assert all(content([one]) == content([other]) for one, other in pairs)


def test_rank_shares_equal_samples_of_step(store):
    ours, _ = sources(store, "windows")
    tokens: list[np.ndarray] = []
    for index in range(3):
        reader = ours.open_reader(place(index, 3))
        reader.begin(24, 2)
        reader.take()
        tokens += [row for one in reader.take() for row in one.tokens.numpy().copy()]
        reader.close()
    assert all(np.array_equal(*pair) for pair in zip(tokens, by_sample(ours, list(range(36, 48))), strict=True))


def test_tokens_have_stored_dtype_without_copy(store):
    """Check that the tensors are memory of DALI, and keep their values while later steps are read."""
    ours, _ = sources(store, "windows")
    reader = ours.open_reader(place(micro=12))
    reader.begin(0, 0)
    kept = [reader.take()[0].tokens for _ in range(8)]
    assert {one.dtype for one in kept} == {torch.uint8}
    for step, one in enumerate(kept):
        assert np.array_equal(one.numpy(), np.stack(by_sample(ours, list(range(12 * step, 12 * step + 12)))))
    assert len({one.data_ptr() for one in kept}) == len(kept)
    reader.close()


def test_prefetch_error_is_raised_by_failing_step(store):
    ours, _ = sources(store, "windows")
    fill = ours.fill

    def broken(numbers, *more):
        if numbers.max() >= 48:  # in the middle of the steps that are read together
            raise UserError("the disk is gone")
        return fill(numbers, *more)

    ours.fill = broken
    reader = ours.open_reader(place())
    reader.begin(0, 0)
    for _ in range(4):
        reader.take()
    for _ in range(2):
        with pytest.raises(UserError, match="the disk is gone"):
            reader.take()
    reader.begin(0, 0)
    assert len(reader.take()) == 6
    reader.close()
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        reader.take()


def test_missing_dali_is_refused_with_install_hint(store, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = find_problems(build_small_run(*SIZES, f"data.path={store}", "data=dali"))
    assert "gangline-dataloader[dali]" in problem.fix
