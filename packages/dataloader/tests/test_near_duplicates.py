"""`--near-duplicates`: estimated resemblance against exact, and choice against a pairwise reference."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.prepare.near import (
    PERMUTATIONS,
    choose_bands,
    compute_signature,
    list_shingles,
    mark_near_unique,
)
from gangline_dataloader.store.manifest import read


def resemblance(one: str, other: str) -> float:
    """Return the exact resemblance of the sets of five consecutive words of two texts."""
    sets = []
    for text in (one, other):
        words = text.lower().split()
        sets.append({tuple(words[n : n + 5]) for n in range(len(words) - 4)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def pair(rng, words: int, changed: int) -> tuple[str, str]:
    """Return two texts that differ in a run of words at the end."""
    one = [f"w{n}" for n in rng.integers(0, 50_000, words)]
    other = one[: words - changed] + [f"x{n}" for n in rng.integers(0, 50_000, changed)]
    return " ".join(one), " ".join(other)


@pytest.mark.parametrize("changed", [0, 20, 60, 120, 200, 300])
def test_signatures_estimate_the_exact_resemblance(changed):
    """Check that mean error and spread over 60 pairs are those of 128 independent draws."""
    rng = np.random.default_rng(changed)
    errors, exact = [], 0.0
    for _ in range(60):
        one, other = pair(rng, 400, changed)
        exact = resemblance(one, other)
        errors.append((compute_signature(one) == compute_signature(other)).mean() - exact)
    deviation = np.sqrt(exact * (1 - exact) / PERMUTATIONS)
    assert abs(np.mean(errors)) <= 4 * deviation / np.sqrt(60) + 1e-12
    assert np.std(errors) <= 1.4 * deviation + 1e-12


def test_signature_ignores_case_and_punctuation():
    assert np.array_equal(
        compute_signature("One, two; three - FOUR five six!"), compute_signature("one two three four five six")
    )
    assert not np.array_equal(
        compute_signature("one two three four five six"), compute_signature("six five four three two one")
    )
    assert len(list_shingles("a b c")) == len(list_shingles("a b c d e")) == 1
    assert not set(list_shingles("a b c")) & set(list_shingles("a b c d"))
    assert len(list_shingles(" -- ")) == 0
    words = [f"w{n}" for n in range(5000)]  # more than one chunk
    halves = [compute_signature(" ".join(part)) for part in (words[:3004], words[3000:])]
    assert np.array_equal(compute_signature(" ".join(words)), np.minimum(*halves))


def test_ascii_shingles_match_unicode_shingles():
    every = "".join(map(chr, range(128))) * 3 + " one_two  3-4"
    words = re.findall(r"\w+", every.lower())
    assert list_shingles(every) == [" ".join(words[place : place + 5]) for place in range(len(words) - 4)]
    assert list_shingles(every + " ö ä")[:-2] == list_shingles(every)


def test_signatures_are_stable_across_versions():
    """Check stored values, because stores and resumed calls depend on them in every version of the library."""
    text = "The quick brown fox jumps over the lazy dog, again and again."
    assert compute_signature(text)[:4].tolist() == [3369256999, 3346357008, 3274915766, 3288578002]


@pytest.mark.parametrize("threshold", [0.02, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
def test_a_pair_at_the_threshold_is_compared(threshold):
    bands, places = choose_bands(threshold)
    assert bands * places == PERMUTATIONS
    assert 1 - (1 - threshold**places) ** bands >= 0.9


def reference(signatures: np.ndarray, alive: np.ndarray, threshold: float) -> np.ndarray:
    """Compare every pair as the docstring of mark_near_unique says, and return its mask."""
    bands, places = choose_bands(threshold)
    kept = np.ones(len(signatures), bool)
    for i in range(len(signatures)):
        for j in range(i):
            same = signatures[i] == signatures[j]
            in_a_band = same.reshape(bands, places).all(1).any()
            if alive[i] and alive[j] and kept[j] and in_a_band and same.mean() >= threshold:
                kept[i] = False
    return kept


@pytest.mark.parametrize("threshold", [0.3, 0.8, 0.95])
def test_near_duplicate_choice_matches_pairwise_comparison(threshold):
    """Check clusters and chains of variants in any order, over tasks of any size, including empty tasks."""
    rng = np.random.default_rng(5)
    texts = []
    for _ in range(12):
        words = [f"w{n}" for n in rng.integers(0, 1000, 60)]
        for _ in range(12):
            texts.append(" ".join(words))
            words = list(words)
            words[rng.integers(0, 60)] = "changed"
    texts = [texts[n] for n in rng.permutation(len(texts))]
    signatures, alive = np.stack([compute_signature(text) for text in texts]), rng.random(len(texts)) < 0.9
    wanted = reference(signatures, alive, threshold)
    assert 12 <= wanted[alive].sum() < alive.sum() - 10
    for cuts in ([], [50], [0, 7, 7, 100, 144]):
        got = mark_near_unique(np.split(signatures, cuts), np.split(alive, cuts), threshold)
        assert [len(one) for one in got] == [len(one) for one in np.split(alive, cuts)]
        assert np.array_equal(np.concatenate(got), wanted)


def test_documents_without_words_are_never_duplicates():
    empty = np.stack(
        [
            compute_signature("--"),
            compute_signature("..."),
            compute_signature("a b c d e f"),
            compute_signature("A B C D E F"),
        ]
    )
    (kept,) = mark_near_unique([empty], [np.ones(4, bool)], 0.8)
    assert kept.tolist() == [True, True, True, False]


@pytest.fixture
def variants(tmp_path: Path) -> tuple[Path, Path]:
    """Return two folders: 20 texts; for each text a near-duplicate and an unrelated one, and one exact duplicate."""
    rng = np.random.default_rng(1)
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    for n in range(20):
        one, close = pair(rng, 300, 5)
        far = pair(np.random.default_rng(1000 + n), 300, 1)[0]
        assert resemblance(one, close) > 0.95
        (folders[0] / f"{n:02}.txt").write_text(one)
        (folders[1] / f"{n:02}-close.txt").write_text(close)
        (folders[1] / f"{n:02}-far.txt").write_text(far)
    (folders[1] / "double.txt").write_text((folders[0] / "00.txt").read_text())
    return folders


def test_near_duplicates_are_dropped_for_any_worker_count(variants, make_store):
    stores = [
        make_store(*variants, near=0.8, task_bytes=size, workers=n) for n, size in ((1, 9000), (2, 9000), (1, 1 << 20))
    ]
    contents = [{path.name: path.read_bytes() for path in store.glob("shard*")} for store in stores]
    assert contents[0] == contents[1] == contents[2]
    for store in stores:
        first, second = (read(store).report["by_source"][str(folder)] for folder in variants)
        assert (first["documents"], first["kept"], first["dropped"]) == (20, 20, {})
        assert (second["documents"], second["kept"]) == (41, 20)
        assert second["dropped"] == {"duplicate": 1, "near-duplicate": 20}
        held_out = read(store / "validation").tokens if (store / "validation").exists() else 0
        assert first["tokens"] + second["tokens"] == read(store).tokens + held_out
    assert read(make_store(*variants)).report["by_source"][str(variants[1])]["dropped"] == {"duplicate": 1}


@pytest.mark.parametrize(
    "words",
    [["--near-duplicates", "0"], ["--near-duplicates", "1.5"], ["--near-duplicates", "0.8", "--keep-duplicates"]],
)
def test_invalid_near_duplicate_threshold_is_refused(words, variants, tmp_path):
    with pytest.raises(UserError, match="--near-duplicates"):
        commands.main(["prepare", str(variants[0]), "--out", str(tmp_path / "out"), *words])
