"""`data.validation_fraction`: rows held out for validation stay held out when the store grows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gangline.config.check import check, find_problems
from gangline.config.validation import build_validation_sets
from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.packing.pack_plan import PackedRows
from gangline_dataloader.sources import build
from gangline_dataloader.sources.split import count_held_out
from gangline_dataloader.store.local import LocalTokens
from gangline_dataloader.store.manifest import VALIDATION
from gangline_testkit.runs import build_small_run


def letters(folder: Path, letter: str) -> Path:
    folder.mkdir()
    for number in range(30):
        (folder / f"{letter}{number}.txt").write_text(f"{letter}{number:03d} " * 9)
    return folder


def prepared(*words: object) -> None:
    assert commands.main(["prepare", *map(str, words), "--workers", "1"]) == 0


@pytest.fixture
def store(tmp_path) -> Path:
    """Return a store without a validation part, with plans of packed rows."""
    prepared(letters(tmp_path / "a", "a"), "--out", tmp_path / "store", "--validation", "0", "--pack", "16")
    return tmp_path / "store"


def source(store: Path, split: str, *words: str, data: str = "tokens"):
    stores = [f"data.path={store}"]
    if data == "mix":
        stores = [f"data.sources.one={store}", "data.weights={one: 1}"]
    run = build_small_run("model.vocab_size=256", "batch.sequence_length=16", f"data={data}", *stores, *words)
    return getattr(build, f"build_{data}")(run.data, run, split)


def rows_of(source, epochs: int = 1) -> set[int]:
    """Return the rows of the store that a source gives."""
    (part,) = source.parts
    return set(source.locate_samples(np.arange(epochs * part.count)).row.tolist())


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("data", ["tokens", "mix"])
def test_no_row_changes_split_when_store_grows(store, tmp_path, data, packing):
    words = (f"data.packing={packing}", "data.validation_fraction=0.1")
    was, held_out = (source(store, split, *words, data=data) for split in ("train", "validation"))
    trained, kept = rows_of(was), rows_of(held_out)
    assert not trained & kept
    assert len(kept) == pytest.approx(0.1 * (len(trained) + len(kept)), abs=1)
    cursor, fingerprint, state = 5, was.compute_fingerprint(), json.loads(json.dumps(was.state(5)))
    for letter in "bc":
        prepared(letters(tmp_path / letter, letter), "--out", store, "--append")
        now, later_held_out = (source(store, split, *words, data=data) for split in ("train", "validation"))
        assert now.continues(fingerprint, cursor, state)
        later = rows_of(now, 3)
        assert len(later) == now.parts[0].count > len(trained)
        assert not later & (kept | rows_of(later_held_out)), "validation leaked into training"
        assert not trained & rows_of(later_held_out), "training leaked into validation"
        assert kept < rows_of(later_held_out), "what is new is held out in proportion"
        trained, kept = later, rows_of(later_held_out)
        assert trained | kept == set(range(len(trained) + len(kept)))
        cursor, fingerprint = cursor + 7, now.compute_fingerprint()
        state = json.loads(json.dumps(now.state(cursor)))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_appended_shards_keep_earlier_held_out_rows(shards, share):
    up_to = np.cumsum(shards)
    held = count_held_out(up_to, share)
    assert ((held >= 0) & (held <= shards)).all()
    wanted = max(1, round(share * up_to[-1])) if share and up_to[-1] else 0
    assert abs(int(held.sum()) - wanted) <= 1
    for count in range(1, len(shards)):
        assert count_held_out(up_to[:count], share).tolist() == held[:count].tolist()


@pytest.mark.parametrize("data", ["tokens", "mix"])
@pytest.mark.parametrize("other", ["0.3", "0.02", "0"])
def test_resume_refuses_different_validation_fraction(store, data, other):
    was = source(store, "train", "data.validation_fraction=0.1", data=data)
    now = source(store, "train", f"data.validation_fraction={other}", data=data)
    with pytest.raises(UserError, match=r"the validation split of .* has changed(.|\n)*data\.validation_fraction=0\.1"):
        now.continues(was.compute_fingerprint(), 5, json.loads(json.dumps(was.state(5))))


def test_resume_refuses_store_with_new_validation_part(store, tmp_path):
    """Append documents with a validation part: all rows of the old store would then be trained on."""
    was = source(store, "train", "data.validation_fraction=0.1")
    prepared(letters(tmp_path / "b", "b"), "--out", store, "--append", "--validation", "0.2")
    assert (store / VALIDATION).exists()
    with pytest.raises(UserError, match=f"the validation split of .* has changed(.|\n)*{VALIDATION}"):
        source(store, "train", "data.validation_fraction=0.1").continues(was.compute_fingerprint(), 5, was.state(5))


def settled(store: Path, *words: str, data: str = "tokens"):
    """Build a run of a store with the given overrides."""
    stores = [f"data.path={store}"] if data == "tokens" else [f"data.sources.one={store}"]
    sizes = ("model.vocab_size=256", "batch.sequence_length=16", "validate.every=5")
    return build_small_run(*sizes, f"data={data}", *stores, *words)


@pytest.mark.parametrize("data", ["tokens", "mix"])
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("share", ["0.3", "0"])
def test_complete_store_as_validation_set_has_all_windows(store, tmp_path, data, packing, share):
    """Check that the windows include those of the part that prepare held out."""
    path = tmp_path / "more"
    prepared(letters(tmp_path / "b", "b"), "--out", path, "--validation", share, "--pack", "16")
    named = f"path: {path}" if data == "tokens" else f"sources: {{one: {path}, two: {store}}}"
    named = f"{named}, packing: {packing}, validation_fraction: 1"
    run = settled(store, f"validate.sets.more={{{named}}}", data=data)
    check(run)
    whole = getattr(build, f"build_{data}")(build_validation_sets(run)["more"], run, "validation")
    folders = [path, *([path / VALIDATION] if share != "0" else []), *([store] if data == "mix" else [])]
    assert [each.folder for each in whole.stores] == folders
    rows = [
        PackedRows(each, 16).up_to[-1] if packing == "best_fit" else each.count_rows(16)
        for each in map(LocalTokens, folders)
    ]
    assert all(rows)
    assert whole.count_samples() == sum(rows)
    place = whole.locate_samples(np.arange(whole.count_samples()))
    shown = set(zip(place.source.tolist(), place.row.tolist(), strict=True))
    assert shown == {(number, row) for number, count in enumerate(rows) for row in range(count)}
    assert all(whole.sample(i)["tokens"].shape == (17,) for i in range(whole.count_samples()))
    (problem,) = find_problems(settled(path, "data.validation_fraction=1", data=data))
    assert "leaves no sequences to train on" in problem.what


@pytest.mark.parametrize("data", ["tokens", "mix"])
def test_complete_store_without_validation_part_is_refused(store, tmp_path, data):
    path = tmp_path / "more"
    prepared(letters(tmp_path / "b", "b"), "--out", path, "--validation", "0.3")
    (path / VALIDATION / "manifest.json").unlink()
    named = f"path: {path}" if data == "tokens" else f"sources: {{one: {path}}}"
    run = settled(store, f"validate.sets.more={{{named}, validation_fraction: 1}}", data=data)
    (problem,) = find_problems(run)
    assert f"{path}/{VALIDATION} is missing or incomplete" in problem.what


def test_complete_store_with_short_validation_part_is_read(store, tmp_path):
    path = tmp_path / "more"
    prepared(letters(tmp_path / "b", "b"), "--out", path, "--validation", "0.1")
    config = f"validate.sets.more={{path: {path}, validation_fraction: 1}}"
    T = LocalTokens(path / VALIDATION).total
    run = settled(store, config, f"batch.sequence_length={T}")
    check(run)
    whole = build.build_tokens(build_validation_sets(run)["more"], run, "validation")
    assert whole.count_samples() == LocalTokens(path).count_rows(T) > 0


def test_validation_fraction_without_effect_is_reported(store, tmp_path):
    path = tmp_path / "more"
    prepared(letters(tmp_path / "b", "b"), "--out", path, "--validation", "0.3")
    for share, told in ((0, 1), (0.5, 1), (0.01, 0)):
        run = settled(path, f"data.validation_fraction={share}")
        notices = run.data.list_notices(run)
        assert len(notices) == told
        assert all(f"data.validation_fraction={share:g} has no effect on {path}" in notice for notice in notices)
        assert settled(store, f"data.validation_fraction={share}").data.list_notices(run) == []
