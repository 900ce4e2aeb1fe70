"""`data.fim_rate`: fill-in-the-middle rearrangement as a function of seed and sample only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from gangline.config.check import find_problems
from gangline_dataloader import commands
from gangline_dataloader.sources import build
from gangline_dataloader.sources.infill import MARKS, Infill
from gangline_testkit.runs import build_small_run

PRE, MID, SUF, END = 100, 101, 102, 0


def parts(row: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return (prefix, middle, suffix) of a document that was rearranged as PSM."""
    assert row[0] == PRE
    suffix, middle = row.index(SUF), row.index(MID)
    return row[1:suffix], row[middle + 1 :], row[suffix + 1 : middle]


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), number=st.integers(0, 1 << 40))
def test_prefix_suffix_middle_keeps_tokens_except_end(lengths, number):
    row = np.concatenate([[*range(1, n), END] for n in lengths]).astype(np.uint16)
    done = row.copy()
    Infill(1.0, 0.0, (PRE, MID, SUF), END, 7, "train").apply(done[None], np.array([number]))
    at = 0
    for n in lengths:
        before, after = row[at : at + n - 1].tolist(), done[at : at + n - 1].tolist()
        assert done[at + n - 1] == END
        if n - 1 >= 8:
            prefix, middle, suffix = parts(after)
            assert [*prefix, *middle, *suffix] == before[:-MARKS]
        else:
            assert after == before
        at += n


def test_suffix_prefix_middle_puts_middle_after_prefix():
    row = np.arange(1, 40, dtype=np.uint16)
    Infill(1.0, 1.0, (PRE, MID, SUF), None, 7, "train").apply(row[None], np.array([3]))
    assert row[:2].tolist() == [PRE, SUF]
    middle = row.tolist().index(MID)
    assert sorted([*row[2:middle], *row[middle + 1 :]]) == list(range(1, 37))
    assert (np.diff(row[middle + 1 :].astype(int)) == 1).all()


def test_rearranged_share_equals_fim_rate():
    """Count rearranged documents of 2000, where a binomial share has a standard deviation of 0.01."""
    infill, changed, spm = Infill(0.3, 0.5, (PRE, MID, SUF), END, 7, "train"), 0, 0
    for number in range(200):
        row = np.tile(np.array([*range(1, 20), END], np.uint16), 10)
        infill.apply(row[None], np.array([number]))
        begins = row.reshape(10, 20)[row.reshape(10, 20)[:, 0] == PRE]
        changed, spm = changed + len(begins), spm + int((begins[:, 1] == SUF).sum())
    assert changed / 2000 == pytest.approx(0.3, abs=0.04)
    assert spm / changed == pytest.approx(0.5 + 0.5 / 17, abs=0.08)  # PSM with an empty prefix also begins PRE, SUF


@pytest.fixture
def store(texts, make_store, tmp_path) -> Path:
    return letters(texts, make_store, tmp_path, "<|endoftext|>")


def letters(texts, make_store, tmp_path, *end: str) -> Path:
    """Make a store of texts as single letters, with the three FIM tokens and with or without an end of text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: n for n, letter in enumerate(sorted(alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([*end, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    folder = make_store(texts, tokenizer=str(tmp_path / "tokenizer.json"), validation=0.2)
    assert commands.main(["prepare", "--out", str(folder), "--pack", "48"]) == 0
    return folder


SIZES = ("model.vocab_size=260", "batch.sequence_length=48", "data=tokens", "validate.every=10")


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_rearranged_sample_is_deterministic(store, packing):
    asked = (*SIZES, f"data.path={store}", f"data.packing={packing}", "data.document_masking=true")
    plain, run = build_small_run(*asked), build_small_run(*asked, "data.fim_rate=0.8")
    assert find_problems(run) == []
    without, source, again = (build.build_tokens(one.data, one, "train") for one in (plain, run, run))
    assert without.compute_fingerprint() != source.compute_fingerprint() == again.compute_fingerprint()
    marks = 0
    for i in reversed(range(40)):
        before, sample, other = without.sample(i), source.sample(i), again.fill(np.array([i, i + 1]))
        assert np.array_equal(sample["tokens"], other.tokens[0])
        for name in ("document", "position", "loss_mask"):
            assert np.array_equal(sample[name], before[name])
        marks += int((sample["tokens"] == 257).sum())
    assert marks > 10
    held_out = build.build_tokens(run.data, run, "validation")
    assert not any((held_out.sample(i)["tokens"] > 256).any() for i in range(held_out.count_samples()))


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_tokens_stay_in_document_without_end_of_text(texts, make_store, tmp_path, packing):
    """Check that each document has only its own letters, and loses only those that make room for the FIM tokens."""
    store = letters(texts, make_store, tmp_path)
    asked = (*SIZES, f"data.path={store}", f"data.packing={packing}", "data.document_masking=true")
    plain, run = build_small_run(*asked), build_small_run(*asked, "data.fim_rate=1")
    without, source = (build.build_tokens(one.data, one, "train") for one in (plain, run))
    changed = 0
    for i in range(60):
        before, after = without.sample(i), source.sample(i)
        for document in range(int(before["document"].max()) + 1):
            here = np.flatnonzero(before["document"] == document)
            old, new = before["tokens"][here], after["tokens"][here]
            gone = np.bincount(old, minlength=260) - np.bincount(new, minlength=260)
            assert gone[:256].min() >= 0, "letters of another document"
            changed += bool(gone.any())
    assert changed >= 60


def test_tokenizer_without_fim_tokens_is_refused(store, texts, make_store):
    asked = (*SIZES, "data.fim_rate=0.5")
    (problem,) = find_problems(build_small_run(*asked, f"data.path={make_store(texts)}"))
    assert "<|fim_prefix|>" in problem.what
    assert "data.fim_rate=0" in problem.why
    (problem,) = find_problems(build_small_run(*asked, f"data.path={store}", "data.fim_tokens=[<|fim_prefix|>,a,a]"))
    assert "three different" in problem.what
