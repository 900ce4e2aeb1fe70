"""`gangline data show`, `samples` and `tokenizer`: printed samples and statistics equal those of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gangline.config import BatchSection
from gangline.errors import UserError
from gangline.run.attempts import Attempt, append, find_next_cursor
from gangline.run.directory import RunDirectory
from gangline_dataloader import commands
from gangline_dataloader.sources import build
from gangline_dataloader.sources.of_run import find_first_sample
from gangline_testkit.runs import build_small_run

ranges = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 80)), max_size=6)


@settings(max_examples=300, deadline=None)
@given(
    passed=ranges,
    size=st.integers(1, 20),
    step=st.integers(1, 60),
    ramp=st.dictionaries(st.integers(1, 20), st.integers(1, 150), max_size=3),
)
def test_first_sample_of_step_matches_loop_cursor(passed, size, step, ramp):
    lines = [Attempt(n + 1, None, skipped=skipped, skipped_from=first) for n, (first, skipped) in enumerate(passed)]
    batch, cursor = BatchSection(global_size=size, ramp=ramp), 0
    for _ in range(step - 1):
        cursor = find_next_cursor(lines, cursor, batch.get_size)
        cursor += batch.get_size(cursor)
    assert find_first_sample(lines, step, batch) == find_next_cursor(lines, cursor, batch.get_size)


@pytest.fixture
def run_dir(tmp_path, texts, make_store):
    """Return the directory of a run of a mixture that was never started, and the run."""
    web = make_store(texts / "deep", shard_tokens=3000)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("ö" * 2000)
    code = make_store(tmp_path / "more", validation=0)
    run = build_small_run(
        "model.vocab_size=256",
        "batch.sequence_length=64",
        "batch.global_size=4",
        "data=mix",
        f"data.sources={{web: {web}, code: {code}}}",
        f"run.dir={tmp_path / 'run'}",
    )
    directory = RunDirectory.create(run)
    directory.unlock()
    return directory, run


def test_samples_command_lists_samples_and_documents_of_step(run_dir, capsys):
    """Compare the output with the samples themselves, also after skipped samples."""
    directory, run = run_dir
    source = build.build_mix(run.data, run, "train")
    for line, first in ((None, 8), (Attempt(2, None, skipped=21, skipped_from=6), 31)):
        if line:
            append(directory.path, line)
        assert commands.main(["samples", str(directory.path), "--step", "3", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["version"], found["step"], found["first_sample"], found["attempt"]) == (
            1, 3, first, line.attempt if line else 1,
        )  # fmt: skip
        assert [one["sample"] for one in found["samples"]] == list(range(first, first + 4))
        for one in found["samples"]:
            store = source.stores[source.names.index(one["source"])]
            tokens = np.empty((1, 65), store.dtype)
            store.copy_windows(np.array([one["first_token"]]), 65, tokens)
            assert np.array_equal(tokens[0], source.sample(one["sample"])["tokens"])
            ends = np.concatenate([[0], store.find_document_ends(0, store.total)])
            wanted = [
                n
                for n in range(store.documents)
                if ends[n] <= one["first_token"] + 64 and ends[n + 1] > one["first_token"]
            ]
            assert one["documents"] == wanted
            assert one["first_token"] == 64 * one["row"]
    assert commands.main(["samples", str(directory.path), "--step", "3"]) == 0
    assert "samples 31 to 34" in capsys.readouterr().out
    for step in ("0", "21"):
        with pytest.raises(UserError, match="steps 1 to 20"):
            commands.main(["samples", str(directory.path), "--step", step])


def test_show_prints_sample_text_with_document_boundaries(run_dir, capsys):
    directory, run = run_dir
    source = build.build_mix(run.data, run, "train")
    boundaries = 0
    for number in range(12):
        commands.main(["show", str(directory.path), "--sample", str(number), "--json"])
        parts = json.loads(capsys.readouterr().out)["documents"]
        boundaries += len(parts) - 1
        if len(parts) == 1 or source.names[0] != "code":
            whole = source.decode(source.sample(number)["tokens"].tolist())
            assert "".join(part["text"] for part in parts) == whole
        commands.main(["show", str(directory.path), "--sample", str(number)])
        shown = capsys.readouterr().out
        assert [f"--- document {part['document']} ---" in shown for part in parts] == [True] * len(parts)
    assert boundaries


def test_data_that_changed_since_the_run_is_refused(run_dir):
    directory, _ = run_dir
    directory.add_provenance("data", {"fingerprint": "another", "is": ""})
    with pytest.raises(UserError, match="has changed since the run read it"):
        commands.main(["samples", str(directory.path), "--step", "1"])


def test_run_without_token_store_is_refused(tmp_path):
    run = build_small_run("model.vocab_size=256", f"run.dir={tmp_path / 'other'}")
    RunDirectory.create(run).unlock()
    with pytest.raises(UserError, match="data=text"):
        commands.main(["samples", str(tmp_path / "other"), "--step", "1"])
    with pytest.raises(UserError, match="--sample"):
        commands.main(["show", str(tmp_path / "other")])


def test_show_prints_store_statistics(texts, make_store, capsys):
    store = make_store(texts, validation=0.2, shard_tokens=2000)
    commands.main(["show", str(store), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == sum(one["documents"] for one in found["lengths"])
    assert found["documents"] + found["validation"]["documents"] == 60
    lengths = np.concatenate([np.diff(np.load(path), prepend=0) for path in sorted(store.glob("*.ends.npy"))])
    for one in found["lengths"]:
        assert one["documents"] == ((lengths >= one["from"]) & (lengths < one["below"])).sum()
    commands.main(["show", str(store)])
    shown = capsys.readouterr().out
    assert "1 dropped: duplicate" in shown
    assert "█" in shown


def test_tokenizer_training_is_deterministic_and_lossless(texts, tmp_path, capsys, make_store):
    again = [sys.executable, "-c", "import sys; from gangline.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    words = ["tokenizer", str(texts), "--vocab-size", "300", "--out"]
    assert commands.main([*words, str(tmp_path / "one.json")]) == 0
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "true"}
    subprocess.run([*again, "data", *words, str(tmp_path / "two.json")], check=True, env=environment)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    store = make_store(texts, tokenizer=str(tmp_path / "one.json"))
    run = build_small_run("model.vocab_size=300", "data=tokens", f"data.path={store}")
    source = build.build_tokens(run.data, run, "train")
    text = "Anything at all: ü, 漢字, \t and \x01."
    assert source.decode(source.encode(text)) == text
    assert source.codec.separator == source.stores[0].end_of_text == 0
    with pytest.raises(UserError, match="already exists"):
        commands.main([*words, str(tmp_path / "one.json")])
    with pytest.raises(UserError, match="257"):
        commands.main(["tokenizer", str(texts), "--vocab-size", "256", "--out", str(tmp_path / "no.json")])
    with pytest.raises(UserError, match=r"the directory .* does not exist"):
        commands.main([*words, str(tmp_path / "nowhere" / "no.json")])


def test_every_command_has_help(capsys):
    for verb in commands.VERBS:
        with pytest.raises(SystemExit) as ended:
            commands.main([verb, "--help"])
        assert ended.value.code == 0
        assert f"gangline data {verb}" in capsys.readouterr().out
