"""Resume with a corpus that grew or a mixture changed after the cursor; other changes are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from gangline.data.reader import ReadPlace
from gangline.errors import UserError
from gangline_dataloader.order.mixture import Ingredient, MixtureOrder, WeightStage
from gangline_dataloader.order.single import SingleOrder
from gangline_dataloader.sources import build
from gangline_dataloader.store.fields import add_checksum
from gangline_dataloader.store.manifest import FILE
from gangline_testkit.runs import build_small_run


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_grown_source_shows_each_row_once_per_epoch(data):
    """Check that an epoch has the rows of its start, and that samples before the cursor stay the same."""
    sizes = sorted(data.draw(st.sets(st.integers(1, 30), min_size=2, max_size=4)))
    order = SingleOrder(Ingredient("a", sizes[0]), 7)
    cursor, seen = 0, 0
    for rows in sizes[1:]:
        cursor += data.draw(st.integers(0, 70))
        before = order(np.arange(cursor))
        order = SingleOrder(Ingredient("a", rows), 7).resume_after(order.deciding, cursor)
        again = order(np.arange(cursor))
        assert all((getattr(before, name) == getattr(again, name)).all() for name in ("epoch", "row"))
    place = order(np.arange(order.epochs.sizes[-1][0] + 2 * sizes[-1]))
    assert (np.diff(place.epoch) >= 0).all()
    for epoch in np.unique(place.epoch):
        rows = np.sort(place.row[place.epoch == epoch])
        assert rows.tolist() == list(range(len(rows))), f"epoch {epoch}"
        assert len(rows) in sizes
        assert len(rows) >= seen
        seen = len(rows)
    assert seen == sizes[-1]


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_grown_mixture_shows_each_row_once_per_epoch(data):
    """Check mixtures with caps and stages too; samples before the cursor stay the same."""
    names = "abc"[: data.draw(st.integers(1, 3))]
    caps = [data.draw(st.none() | st.integers(1, 4)) for _ in names]
    weights = st.lists(st.integers(0, 9), min_size=len(names), max_size=len(names)).filter(any)
    stages = [WeightStage(start, tuple(data.draw(weights))) for start in (0, data.draw(st.integers(1, 90)))]
    rows = [data.draw(st.integers(1, 30)) for _ in names]

    def order(rows: list[int]) -> MixtureOrder:
        return MixtureOrder(
            [Ingredient(*one, None, cap) for *one, cap in zip(names, rows, caps, strict=True)], stages, 7
        )

    now, cursor = order(rows), 0
    for _ in range(2):
        cursor = min(cursor + data.draw(st.integers(0, 70)), now.end or 10**9)
        before, sizes = now(np.arange(cursor)), {n: e.sizes for n, e in zip(names, now.epochs, strict=True)}
        rows = [each + data.draw(st.integers(0, 20)) for each in rows]
        now = order(rows).resume_after(sizes, cursor)
        again = now(np.arange(cursor))
        assert all((getattr(before, name) == getattr(again, name)).all() for name in ("source", "epoch", "row"))
    place = now(np.arange(min(cursor + 300, now.end or 10**9)))
    for k, each in enumerate(rows):
        epoch = place.epoch[place.source == k]
        assert (np.diff(epoch) >= 0).all()
        assert caps[k] is None or epoch.max(initial=0) < caps[k]
        for number in np.unique(epoch)[:-1]:
            seen = np.sort(place.row[(place.source == k) & (place.epoch == number)])
            assert seen.tolist() == list(range(len(seen))), f"epoch {number}"
            assert len(seen) <= each
    for k in range(len(names)) if now.end is not None and now.end <= cursor + 300 else ():
        last = place.row[(place.source == k) & (place.epoch == place.epoch[place.source == k].max(initial=0))]
        assert len(np.unique(last)) == len(last)


def grown(store: Path, by: Path) -> None:
    """Append the shards of another store to this store."""
    mine, theirs = (json.loads((each / FILE).read_text()) for each in (store, by))
    for number in range(len(theirs["shards"]["tokens"])):
        to = len(mine["shards"]["tokens"]) + number
        for ending in ("npy", "ends.npy"):
            (store / f"shard-{to:05d}.{ending}").write_bytes((by / f"shard-{number:05d}.{ending}").read_bytes())
    mine["shards"] = {name: column + theirs["shards"][name] for name, column in mine["shards"].items()}
    (store / FILE).write_text(json.dumps(add_checksum(mine)))


def letters(folder: Path, letter: str, files: int = 30) -> Path:
    folder.mkdir()
    for number in range(files):
        (folder / f"{number}.txt").write_text(f"{letter}{number:03d} " * 9)
    return folder


def source(store: Path, *settings: str):
    run = build_small_run(
        "model.vocab_size=256", "batch.sequence_length=16", "data=tokens", f"data.path={store}", *settings
    )
    return build.build_tokens(run.data, run, "train")


def test_resume_continues_with_grown_corpus(tmp_path, make_store):
    store = make_store(letters(tmp_path / "a", "a"), validation=0)
    first = source(store)
    cursor, state = 20, json.loads(json.dumps(first.state(20)))
    rows = first.count_samples()
    assert cursor < rows
    read = [first.sample(i)["tokens"].tobytes() for i in range(rows)]
    grown(store, make_store(letters(tmp_path / "b", "b"), validation=0))
    now = source(store)
    reader = now.open_reader(ReadPlace(0, 1, 4, 4, torch.device("cpu")))
    assert now.compute_fingerprint() != first.compute_fingerprint()
    assert now.continues(first.compute_fingerprint(), cursor, state)
    assert [now.sample(i)["tokens"].tobytes() for i in range(rows)] == read
    more = [now.sample(i)["tokens"].tobytes() for i in range(rows, rows + now.count_samples())]
    assert len(set(more)) == now.count_samples() > rows
    assert any(b"b" in each for each in more)
    reader.begin(rows, 5)
    assert reader.take()[0].tokens[0].numpy().tobytes() == more[0]
    reader.close()
    # The next start reads the grown store, and the past of the run from the checkpoint.
    later = source(store)
    assert later.compute_fingerprint() != now.compute_fingerprint()
    assert later.continues(now.compute_fingerprint(), rows + 3, json.loads(json.dumps(now.state(rows + 3))))
    assert later.compute_fingerprint() == now.compute_fingerprint()
    assert [later.sample(i)["tokens"].tobytes() for i in range(rows)] == read


@pytest.mark.parametrize("change", ["run.seed=8", "data.document_masking=true", "batch.sequence_length=15"])
def test_resume_refuses_different_order(tmp_path, make_store, change):
    store = make_store(letters(tmp_path / "a", "a"), validation=0)
    first = source(store)
    assert not source(store, change).continues(first.compute_fingerprint(), 20, first.state(20))


def test_resume_refuses_smaller_or_different_corpus(tmp_path, make_store):
    small, other = (make_store(letters(tmp_path / name, name), validation=0) for name in "ab")
    first = source(small)
    assert not source(other).continues(first.compute_fingerprint(), 20, first.state(20))
    grown(small, other)
    whole = source(small)
    assert not source(other).continues(whole.compute_fingerprint(), 20, whole.state(20))


WEB = "data.weights={web: 0.7, code: 0.3}"


def mixed(stores: dict[str, Path], *settings: str):
    sources = tuple(f"data.sources.{name}={path}" for name, path in stores.items())
    run = build_small_run("model.vocab_size=256", "batch.sequence_length=16", "data=mix", *sources, *settings)
    return build.build_mix(run.data, run, "train")


@pytest.fixture
def stores(tmp_path, make_store) -> dict[str, Path]:
    return {name: make_store(letters(tmp_path / name, name[0]), validation=0) for name in ("web", "code", "more")}


def test_resume_accepts_mixture_changed_after_cursor(stores):
    """Add a source that the mixture did not have, and whose name comes first."""
    two = {name: stores[name] for name in ("web", "code")}
    first = mixed(two, WEB)
    state = json.loads(json.dumps(first.state(100)))
    later = mixed(
        two | {"also": stores["more"]},
        "data.weights={web: 0.7, code: 0.3, also: 0}",
        "data.stages=[{from: 100, weights: {web: 0, code: 1, also: 1}}]",
    )
    assert later.continues(first.compute_fingerprint(), 100, state)
    for i in range(100):
        assert later.sample(i)["tokens"].tobytes() == first.sample(i)["tokens"].tobytes()
    assert {bytes(later.sample(i)["tokens"])[:200].count(b"w") for i in range(100, 140)} == {0}


@pytest.mark.parametrize(
    "changed",
    [
        (WEB, "data.stages=[{from: 99, weights: {web: 0, code: 1}}]"),
        ("data.weights={web: 0.6, code: 0.4}",),
    ],
)
def test_resume_refuses_mixture_changed_before_cursor(stores, changed):
    two = {name: stores[name] for name in ("web", "code")}
    first = mixed(two, WEB)
    with pytest.raises(UserError, match="would change samples that the run has read"):
        mixed(two, *changed).continues(first.compute_fingerprint(), 100, first.state(100))


def test_resume_accepts_epoch_cap_not_yet_reached(stores):
    two = {name: stores[name] for name in ("web", "code")}
    first = mixed(two, WEB)
    mixture = first.order.mixture
    (code,) = (number for number, one in enumerate(mixture.ingredients) if one.name == "code")
    rows = mixture.ingredients[code].rows
    cursor = 4 * rows  # 30 % of the samples are from code, so its first epoch is over
    assert 1.05 < mixture.count_used(cursor)[code] / rows < 2
    for epochs in (2, 9):
        later = mixed(two, WEB, f"data.epochs={{code: {epochs}}}")
        assert later.continues(first.compute_fingerprint(), cursor, json.loads(json.dumps(first.state(cursor))))
        for i in range(cursor - 50, cursor):
            assert later.sample(i)["tokens"].tobytes() == first.sample(i)["tokens"].tobytes()
    with pytest.raises(UserError, match=r"data\.epochs of code would change samples"):
        mixed(two, WEB, "data.epochs={code: 1}").continues(first.compute_fingerprint(), cursor, first.state(cursor))


def test_resume_with_grown_store_requires_explicit_weights(stores, tmp_path, make_store):
    """Leave data.weights unset: the shares follow the store sizes, so they would also change samples already read."""
    two = {name: stores[name] for name in ("web", "code")}
    first = mixed(two)
    fingerprint, state = first.compute_fingerprint(), json.loads(json.dumps(first.state(100)))
    grown(two["web"], stores["more"])
    with pytest.raises(UserError, match=r"data\.weights.* would change samples that the run has read") as caught:
        mixed(two).continues(fingerprint, 100, state)
    (named,) = re.findall(r"'(data\.weights=.*)'  restores the old weights", str(caught.value))
    now = mixed(two, named)
    assert now.continues(fingerprint, 100, state), "it goes on as the message says"
    for i in range(100):
        assert now.sample(i)["tokens"].tobytes() == first.sample(i)["tokens"].tobytes()


def test_resume_refuses_a_different_store(stores):
    first = mixed({"web": stores["web"], "code": stores["code"]}, WEB)
    other = mixed({"web": stores["web"], "code": stores["more"]}, WEB)
    assert not other.continues(first.compute_fingerprint(), 100, first.state(100))
