"""Several validation sets in one run: their options, refused combinations, recorded losses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gangline.config.check import check
from gangline.config.paths import resolve_paths
from gangline.config.serial import from_dict, to_dict
from gangline.config.validation import build_validation_sets
from gangline.errors import UserError
from gangline_basics.data.corpus import list_corpus, split
from gangline_testkit.runs import build_small_run


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """Write the corpora a/ and b/, each one file with different text, and return their folder."""
    for name, text in (("a", "the quick brown fox. "), ("b", "lorem ipsum dolor sit amet, ")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text * 200)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*settings: str) -> str:
    with pytest.raises(UserError) as caught:
        check(build_small_run("model.vocab_size=256", "data.path=a", *settings))
    return str(caught.value)


def test_validation_set_overrides_data_options(corpora):
    run = build_small_run(
        "model.vocab_size=256",
        "data.path=a",
        "data.document_masking=true",
        "validate.sets.b={path: b, validation_fraction: 1}",
        "validate.sets.none=null",
    )
    check(run)
    assert list(build_validation_sets(run)) == ["b"]
    config = build_validation_sets(run)["b"]
    assert (config.path, config.document_masking, config.validation_fraction) == ("b", True, 1.0)
    written = resolve_paths(run)
    assert written["validate"]["sets"]["b"] == {"path": os.path.abspath("b"), "validation_fraction": 1}
    assert to_dict(from_dict(written))["validate"] == written["validate"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("validate.sets.b={pth: b}", "validate.sets.b.pth: data=text has no such option"),
        ("validate.sets.b={document_masking: 7}", "validate.sets.b.document_masking=7: expected true or false"),
        ("validate.sets.b={path: c}", "validate.sets.b: data.path=c names no files"),
        (
            "validate.sets.b={validation_fraction: 2}",
            "validate.sets.b.validation_fraction=2.0 must be at least 0 and at most 1",
        ),
        ("validate.sets={a/b: {path: b}}", "'a/b' is not a valid name."),
        ("validate.sets.b=b", "expected a mapping"),
        ("data.validation_fraction=1", "data.validation_fraction=1 leaves no text to train on"),
    ],
)
def test_invalid_validation_set_is_refused(setting, message, corpora):
    assert message in refused(setting)


def test_run_validates_on_each_validation_set(runs, corpora):
    """Use a set with the run's own options, whose losses agree; change sets on resume; refuse an unknown option."""
    words = (
        "run.dir=out",
        f"data.path={corpora}/a",
        "validate.every=3",
        "validate.samples=3",
        f"validate.sets={{same: {{}}, b: {{path: {os.path.relpath(corpora / 'b', runs.directory)}, "
        "validation_fraction: 1}}",
    )
    assert "has no such option" in runs.train(*words, "validate.sets.b.fraction=1", code=2)
    assert not (runs.directory / "out").exists()
    printed = runs.train(*words, "track=[console,jsonl]")
    held = [record for record in runs.read_records("out") if record["validation_losses"]]
    assert [record["step"] for record in held] == [3, 6]
    for record in held:
        assert record["validation_losses"]["same"] == record["validation_loss"]
        assert record["validation_losses"]["b"] != record["validation_loss"]
    assert f"b={held[-1]['validation_losses']['b']:.4f}" in printed
    kept = json.loads((runs.directory / "out" / "provenance.json").read_text())
    assert kept["validation_sets"]["b"]["is"].startswith("1 files")
    runs.train("resume=out", "run.steps=9", "validate.sets.same=null", "validate.sets.more={document_masking: true}")
    assert set(runs.read_records("out")[-1]["validation_losses"]) == {"b", "more"}


def test_validation_set_with_another_tokenizer_is_refused(runs, corpora):
    """Refuse the set, because its tokens have other meanings, so that its loss cannot be compared."""
    words = ("run.dir=other", f"data.path={corpora}/a", "validate.every=3", "data.separator=z")
    printed = runs.train(*words, "validate.sets={b: {separator: x}}", code=2)
    assert "validate.sets.b has another tokenizer than the training data" in printed
    assert "end of text 120" in printed


def test_changed_held_out_text_is_refused(runs, corpora):
    words = ("run.dir=changed", f"data.path={corpora}/many", "data.validation_fraction=0.1", "validate.every=3")
    (corpora / "many").mkdir()
    for number in range(60):
        (corpora / "many" / f"{number}.txt").write_text(f"page {number} of the best of times. " * 8)
    other = corpora / "set.txt"
    other.write_text("it was the worst of times. " * 20)
    runs.train(*words, f"validate.sets={{s: {{path: {other}, validation_fraction: 1}}}}")
    parts = split(list_corpus(f"{corpora}/many"), 0.1, "validation")
    assert 0 < len(parts) < 60
    other.write_text("it was the spring of hope. " * 20)
    assert "validate.sets.s has changed" in runs.train("resume=changed", "run.steps=9", "track=[console,jsonl]")
    assert "has changed" not in runs.train("resume=changed", "run.steps=10", "track=[console,jsonl]")
    held = Path(parts[0].file.path)
    kept = held.read_text()
    held.write_text(kept.upper())
    assert "the held-out validation data of this run has changed" in runs.train(
        "resume=changed", "run.steps=12", code=2
    )
    held.write_text(kept)
    runs.train("resume=changed", "run.steps=12")
