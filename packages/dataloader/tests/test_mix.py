"""`data=mix`: source weights, stages, resume at any cursor, refused mixtures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from gangline.config.check import find_problems
from gangline.config.paths import resolve_paths
from gangline.errors import UserError
from gangline_dataloader.sources import build
from gangline_dataloader.store.fields import add_checksum
from gangline_testkit.runs import build_small_run

WEIGHTS = "data.weights={web: 0.7, code: 0.3}"


@pytest.fixture
def stores(tmp_path: Path, make_store) -> dict[str, Path]:
    """Return two byte stores of one letter each, so that a sample shows its source."""
    made = {}
    for name, letter in (("web", "w"), ("code", "c")):
        for number in range(40):
            path = tmp_path / name / f"{number}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(letter * (30 + number))
        made[name] = make_store(tmp_path / name, validation=0.2)
    return made


def run_of(stores: dict[str, Path], *settings: str):
    sources = tuple(f"data.sources.{name}={path}" for name, path in stores.items())
    return build_small_run("model.vocab_size=256", "batch.sequence_length=16", "data=mix", *sources, *settings)


def said(run) -> str:
    return "\n".join(f"{problem.what} {problem.why} {problem.fix}" for problem in find_problems(run))


def letters(source, numbers) -> np.ndarray:
    return np.array([max(bytes(source.sample(int(i))["tokens"])) for i in numbers])


@pytest.mark.parametrize("split", ["train", "validation"])
def test_samples_follow_mixture_weights(stores, split):
    run = run_of(stores, "data.weights={web: 7, code: 3}", "data.epochs={web: 1000, code: 1000}")
    source = build.build_mix(run.data, run, split)
    if split == "train":
        web = (letters(source, range(2000)) == ord("w")).mean()
        assert web == pytest.approx(0.7, abs=0.04)  # exact over 65,536 samples; the standard deviation here is 0.01
    else:  # each held-out sequence once, then again in the same order
        parts = dict(zip(source.names, (store.count_rows(16) for store in source.stores), strict=True))
        count = source.count_samples()
        seen = letters(source, range(2 * count))
        assert count == sum(parts.values())
        assert [(seen == ord(name[0])).sum() for name in source.names] == [2 * n for n in parts.values()]
        assert (seen[:count] == seen[count:]).all()


def test_stage_changes_weights_at_named_sample(stores):
    run = run_of(stores, "data.weights={web: 1, code: 0}", "data.stages=[{from: 77, weights: {web: 0, code: 3}}]")
    found = letters(build.build_mix(run.data, run, "train"), range(200))
    assert (found[:77] == ord("w")).all()
    assert (found[77:] == ord("c")).all()


def test_mixture_resumes_bitwise_at_any_cursor(stores):
    """Build the mixture again at each cursor, as a resumed run does, with the sources in another order."""
    options = (WEIGHTS, "data.stages=[{from: 500, weights: {web: 0.001, code: 0.999}}]", "data.document_masking=true")
    run = run_of(stores, *options)
    whole = build.build_mix(run.data, run, "train")
    rng = np.random.default_rng(0)
    for cursor in [0, 1023, 1024, *rng.integers(0, 100_000, 20).tolist(), 10**12]:
        again = run_of(dict(reversed(stores.items())), *options)
        source = build.build_mix(again.data, again, "train")
        assert source.compute_fingerprint() == whole.compute_fingerprint()
        for i in range(cursor, cursor + 3):
            one, other = whole.sample(i), source.sample(i)
            assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "change",
    [WEIGHTS.replace("0.7", "0.8"), "data.epochs={web: 3}", "data.stages=[{from: 9, weights: {web: 1, code: 1}}]"],
)
def test_another_mixture_has_another_fingerprint(stores, change):
    one, other = run_of(stores, WEIGHTS), run_of(stores, WEIGHTS, change)
    assert (
        build.build_mix(one.data, one, "train").compute_fingerprint()
        != build.build_mix(other.data, other, "train").compute_fingerprint()
    )


def test_run_longer_than_capped_sources_is_refused(stores):
    settings = (WEIGHTS, "data.epochs={web: 1, code: 2}", "batch.global_size=4", "run.steps=100000")
    run = run_of(stores, *settings)
    source = build.build_mix(run.data, run, "train")
    rows = dict(zip(source.names, (store.count_rows(16) for store in source.stores), strict=True))
    end = rows["web"] + 2 * rows["code"]
    assert source.count_samples() == end
    assert f"ends after {end} samples, and this run reads 400000" in said(run)
    assert f"run.steps={end // 4}" in said(run)
    assert said(run_of(stores, *settings, f"run.steps={end // 4}")) == ""
    ramp = f"batch.ramp={{1: {end // 2}}}"
    most = end // 2 + (end - end // 2) // 4
    assert f"run.steps={most}," in said(run_of(stores, *settings, ramp))
    assert said(run_of(stores, *settings, ramp, f"run.steps={most}")) == ""
    assert source.sample(end - 1)["tokens"].shape == (17,)
    with pytest.raises(UserError, match=f"ends after {end}"):
        source.sample(end)
    uncapped = run_of(stores, WEIGHTS, "data.epochs={web: 1}", "run.steps=100000")
    assert said(uncapped) == ""
    assert build.build_mix(uncapped.data, uncapped, "train").count_samples() is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("data.weights={web: -1, code: 2}",), "at least 0"),
        (("data.weights={web: 0, code: 0}",), "zero"),
        (("data.weights={web: 0.00001, code: 1}",), "1/65536"),
        (("data.weights={web: 1}",), "has no weight for code"),
        (("data.weights={web: 1, code: 1, wbe: 1}",), "unknown source wbe"),
        (("data.epochs={cod: 1}",), "unknown source cod"),
        (("data.epochs={code: 0}",), "at least 1"),
        (("data.epochs={code: 1000000000000000000}",), "at most 1000000"),
        ((f"data.stages=[{{from: {10**30}, weights: {{web: 1, code: 1}}}}]",), "must be more than 0"),
        (("data.stages=[{from: 0, weights: {web: 1, code: 1}}]",), "must be more than 0"),
        (("data.stages=[{from: 5, weight: {web: 1, code: 1}}]",), "must have the keys `from` and `weights`"),
        (("data.stages=[{from: 5, weights: {web: 1, code: -1}}]",), "at least 0"),
        (("data.stages=[{from: 5, weights: {web: 1, code: lots}}]",), "each weight must be a number"),
        (("model.vocab_size=255",), "model.vocab_size=256"),
        (("batch.sequence_length=5000",), "too short"),
        (("data.sources.code=nowhere",), "does not exist"),
    ],
)
def test_invalid_mixture_is_refused_before_start(stores, settings, why):
    assert why in said(run_of(stores, *settings))


def test_mixture_without_sources_suggests_option():
    assert "data.sources={web: DIR" in said(run_of({}))


def test_path_with_sources_is_refused(stores):
    assert "data.path=/nonexistent has no effect" in said(run_of(stores, "data.path=/nonexistent"))
    assert said(run_of(stores)) == ""


@pytest.mark.parametrize("field", ["identity", "end_of_text", "vocab_size", "dtype"])
def test_stores_of_different_tokens_are_refused_by_name(stores, field):
    path = stores["code"] / "manifest.json"
    content = json.loads(path.read_text())
    change = {"identity": "other", "end_of_text": 1, "vocab_size": 200, "dtype": "<u2"}[field]
    (content if field in content else content["tokenizer"])[field] = change
    path.write_text(json.dumps(add_checksum(content)))
    assert "code and web have different" in said(run_of(stores))


def test_relative_paths_resolve_from_working_directory(stores, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    relative = {name: Path(os.path.relpath(path)) for name, path in stores.items()}
    run = run_of(relative, f"validate.sets.one={{sources: {{code: {relative['code']}}}}}")
    written = resolve_paths(run)
    assert written["data"]["sources"] == {name: str(path) for name, path in stores.items()}
    assert written["validate"]["sets"]["one"]["sources"] == {"code": str(stores["code"])}
