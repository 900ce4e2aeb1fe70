"""`data.packing=best_fit`: documents packed into rows, few documents split, little padding, stored plans."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gangline.config.check import find_problems
from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.packing import pack_plan
from gangline_dataloader.packing.best_fit import pack_documents
from gangline_dataloader.sources import build
from gangline_dataloader.store.local import LocalTokens
from gangline_dataloader.store.manifest import FILE, read
from gangline_testkit.runs import build_small_run


def rows_of(ends: np.ndarray, capacity: int) -> list[list[tuple[int, int]]]:
    pieces, rows = pack_documents(ends, capacity)
    cut = np.split(pieces.astype(int), rows[:-1])
    return [[(int(start), int(start + length)) for start, length in row] for row in cut]


@settings(max_examples=300, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=80), capacity=st.integers(2, 40))
def test_packing_keeps_every_token_and_target_once(lengths, capacity):
    """Check also documents that are longer than a row."""
    ends = np.cumsum(lengths)
    rows = rows_of(ends, capacity)
    assert max(sum(stop - start for start, stop in row) for row in rows) <= capacity
    targets = [token for row in rows for start, stop in row for token in range(start + 1, stop)]
    firsts = {0, *ends[:-1].tolist()}
    assert sorted(targets) == sorted(set(range(ends[-1])) - firsts)
    begun = {start for row in rows for start, _ in row}
    assert firsts <= begun
    for start, stop in ((s, e) for row in rows for s, e in row):
        assert np.searchsorted(ends, start, side="right") == np.searchsorted(ends, stop - 1, side="right")
    whole = sum(length <= capacity for length in lengths)
    assert sum(start in firsts and stop in ends for row in rows for start, stop in row) >= whole


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_packing_matches_best_fit_decreasing(lengths):
    """Compare with a plain best-fit decreasing: as many rows, with the same room left in each."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [left for left in room if left >= length]
        if fitting:
            room.remove(min(fitting))
        room.append((min(fitting) if fitting else 30) - length)
    rows = rows_of(np.cumsum(lengths), 30)
    assert sorted(room) == sorted(30 - sum(stop - start for start, stop in row) for row in rows)


@pytest.mark.parametrize("T", [2048, 8192])
def test_padding_of_web_like_documents_is_small(T):
    """Check at most 0.05 % of padding in a shard of 2^26 tokens; lognormal lengths, median 403, mean 738."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(np.log(403), 1.1, 90_000).astype(np.int64))
    pieces, rows = pack_documents(np.cumsum(lengths), T + 1)
    assert int(pieces[:, 1].sum(dtype=np.int64)) >= lengths.sum()
    assert 1 - pieces[:, 1].sum(dtype=np.int64) / (len(rows) * (T + 1)) <= 0.0005


SIZES = ("model.vocab_size=256", "batch.sequence_length=48", "data=tokens", "data.packing=best_fit")


@pytest.fixture
def store(texts, make_store) -> Path:
    folder = make_store(texts, clean=(), shard_tokens=4000, validation=0.2)
    assert commands.main(["prepare", "--out", str(folder), "--pack", "48"]) == 0
    return folder


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_epoch_shows_every_document_once(store, split, apart):
    run = build_small_run(
        *SIZES, f"data.path={store}", f"data.document_masking={str(apart).lower()}", "validate.every=10"
    )
    assert find_problems(run) == []
    source = build.build_tokens(run.data, run, split)
    whole = source.stores[0]
    tokens = np.empty((1, whole.total), whole.dtype)
    whole.copy_windows(np.array([0]), whole.total, tokens)
    found = []
    for i in range(source.count_samples()):
        sample = source.sample(i)
        row = source.list_token_ranges(*source.locate_sample(i))
        used = sum(stop - start for start, stop in row)
        assert np.array_equal(sample["tokens"][:used], np.concatenate([tokens[0, a:b] for a, b in row]))
        assert (sample["tokens"][used:] == 0).all()
        assert not sample["loss_mask"][used - 1 :].any()
        assert int(sample["filled"]) == min(used, 48)
        if apart:
            sizes = [stop - start for start, stop in row]
            numbers = np.repeat(np.arange(len(row) + 1), [*sizes, 49 - used])
            assert np.array_equal(sample["document"], numbers[:-1])
            assert (sample["position"][np.flatnonzero(np.diff(numbers[:-1], prepend=-1))] == 0).all()
            assert sample["loss_mask"].sum() == used - len(row)
        else:
            assert set(sample) == {"tokens", "loss_mask", "filled"}
            assert sample["loss_mask"].sum() == used - 1
        found += row
    ends = whole.find_document_ends(0, whole.total)
    assert {start for start, _ in found} >= {0, *ends[:-1].tolist()}
    covered = np.zeros(whole.total, int)
    for start, stop in found:
        covered[start:stop] += 1
    assert covered.min() == 1


def test_missing_plan_error_gives_prepare_command(store, texts, make_store):
    run = build_small_run(*SIZES, f"data.path={store}", "batch.sequence_length=64")
    (problem,) = find_problems(run)
    assert "no pack plan for sequences of 64" in problem.what
    assert "Sequence lengths with a pack plan: 48." in problem.why
    command = problem.why.splitlines()[-1].split()
    assert command[:3] == ["gangline", "data", "prepare"]
    assert commands.main(command[2:]) == 0
    assert find_problems(run) == []
    assert pack_plan.list_lengths(store) == [48, 64]


def test_repeated_prepare_writes_identical_plans(texts, tmp_path, capsys):
    command = ["prepare", str(texts), "--out", str(tmp_path / "one"), "--pack", "48", "--pack", "96"]
    assert commands.main(command) == 0
    assert "sequences of 96 tokens, " in capsys.readouterr().out
    first = {path.name: path.read_bytes() for path in (tmp_path / "one").glob("*pack*")}
    assert len(first) == 2 * (1 + 2 * len(read(tmp_path / "one").shards))
    for name in first:
        (tmp_path / "one" / name).unlink()
    assert commands.main(command) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "one").glob("*pack*")} == first


def test_error_names_damaged_or_mismatched_pack_plan(store, texts, make_store, capsys):
    other = make_store(texts, validation=0.3)
    for name in (pack_plan.name_plan_file(48), *(f.name for f in store.glob("shard-00000.pack-48*"))):
        (other / name).write_bytes((store / name).read_bytes())
    (problem,) = find_problems(build_small_run(*SIZES, f"data.path={other}"))
    assert "is the pack plan of another store" in problem.what
    path = store / pack_plan.name_pack_file(0, 48)
    content = bytearray(path.read_bytes())
    content[128 + 4] ^= 1
    path.write_bytes(content)
    assert commands.main(["verify", str(store)]) == 1
    assert f"{path}: the checksum differs" in capsys.readouterr().out
    path.write_bytes(path.read_bytes()[:-1])
    run = build_small_run(*SIZES, f"data.path={store}")
    source = build.build_tokens(run.data, run, "train")
    with pytest.raises(UserError, match="pack-48"):
        [source.sample(i) for i in range(source.count_samples())]


def test_unpackable_data_and_options_are_refused(store, tmp_path):
    (tmp_path / "train.bin").write_bytes(np.zeros(400, "<u2").tobytes())
    (problem,) = find_problems(build_small_run(*SIZES, f"data.path={tmp_path / 'train.bin'}"))
    assert "does not support data.packing=best_fit" in problem.what
    (problem,) = find_problems(build_small_run(*SIZES, f"data.path={store}", "data.order=text"))
    assert "data.order=text" in problem.what
    with pytest.raises(UserError, match="--pack 0"):
        commands.main(["prepare", "--out", str(store), "--pack", "0"])
    with pytest.raises(UserError, match="slip does not exist"):  # the command creates no other store
        commands.main(["prepare", "--out", str(tmp_path / "slip"), "--pack", "48"])
    assert not (tmp_path / "slip").exists()


def test_a_mixture_packs_each_of_its_stores(store, texts, make_store):
    other = make_store(texts / "deep", clean=(), validation=0.2)
    assert commands.main(["prepare", "--out", str(other), "--pack", "48"]) == 0
    sizes = (*SIZES[:2], "data=mix", "data.packing=best_fit", "data.document_masking=true")
    run = build_small_run(*sizes, f"data.sources={{a: {store}, b: {other}}}", "data.weights={a: 1, b: 1}")
    assert find_problems(run) == []
    source = build.build_mix(run.data, run, "train")
    assert [one.count for one in source.parts] == [pack_plan.read(folder, 48).rows for folder in (store, other)]
    assert {source.locate_sample(i)[0] for i in range(20)} == {0, 1}
    assert all("document" in source.sample(i) for i in range(20))


def test_plan_files_are_readable_by_numpy(store):
    columns = json.loads((store / pack_plan.name_plan_file(48)).read_text())["shards"]
    assert len(columns["rows"]) == len(read(store).shards) > 1
    assert len(np.load(store / pack_plan.name_pack_file(0, 48))) == 2 * columns["pieces"][0]
    assert (store / FILE).exists()
    assert LocalTokens(store).total == read(store).tokens


def test_byte_store_for_large_vocabulary_is_reported(store):
    run = build_small_run(*SIZES, f"data.path={store}")
    assert run.data.list_notices(run) == []
    run = build_small_run(*SIZES, f"data.path={store}", "model.vocab_size=128256")
    (notice,) = run.data.list_notices(run)
    assert " is 256, model.vocab_size is 128256" in notice
