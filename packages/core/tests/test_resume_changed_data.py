"""Resume with changed data: accepted if the data source allows it, and recorded with the start."""

from __future__ import annotations

import pytest

from gangline.errors import UserError
from gangline.record import read_records
from gangline_basics.data.text import TextSource
from gangline_testkit.sessions import open_session, read_lines, train_session

SIZE = 4


def settings(path, steps: int) -> tuple[str, ...]:
    return (f"data.path={path}", f"run.steps={steps}", f"batch.global_size={SIZE}", "batch.sequence_length=16")


def test_a_resume_refuses_damaged_attempts(tmp_path):
    """Refuse an edited attempt number, also in a line without a checksum, instead of starting at step 0."""
    run_dir = tmp_path / "out"
    train_session(run_dir, "run.steps=2")
    path = run_dir / "attempts.jsonl"
    whole = path.read_text()
    path.write_text(whole.replace('"attempt": 1', '"attempt": 5'))
    with pytest.raises(UserError, match="is damaged in line 1: the checksum does not match"):
        open_session(run_dir, "run.steps=4")
    path.write_text('{"attempt": 5, "start": null}\n')
    with pytest.raises(UserError, match=r"no checkpoint in .* led to attempt 5"):
        open_session(run_dir, "run.steps=4")
    assert path.read_text() == '{"attempt": 5, "start": null}\n'
    path.write_text(whole)
    assert open_session(run_dir, "run.steps=4").step == 2


def test_resume_accepts_changed_data_if_source_allows(tmp_path, monkeypatch):
    before, after, run_dir = tmp_path / "before.txt", tmp_path / "after.txt", tmp_path / "run"
    before.write_text("".join(f"{number} " for number in range(2000)))
    after.write_text(before.read_text() + "and more " * 100)
    assert train_session(run_dir, *settings(before, 4)) == 0
    with pytest.raises(UserError, match="trained on other data"):
        open_session(run_dir, *settings(after, 6))
    asked = []
    monkeypatch.setattr(TextSource, "continues", lambda self, *given: asked.append((self, *given)) or True)
    assert train_session(run_dir, *settings(after, 6)) == 0
    ((source, fingerprint, cursor, state),) = asked
    assert (cursor, state) == (4 * SIZE, {})
    first, second = read_lines(run_dir, "attempts.jsonl")
    assert "data" not in first
    assert second["data"] == f"from sample 16 on: fingerprint {fingerprint} before, {source.compute_fingerprint()} now"
    records = read_records(run_dir / "metrics.jsonl")
    assert [record["first_sample"] for record in records] == [SIZE * step for step in range(6)]
    assert any("the data has changed" in note for record in records for note in record["notes"])


@pytest.mark.parametrize(
    ("edited", "stored"),
    [
        ("optimizer.learning_rate=0.007", "optimizer.learning_rate=0.003"),
        ("run.seed=1", "run.seed=7"),
        ("schedule.warmup_steps=9", "schedule.warmup_steps=null"),
        ("batch.global_size=6", "batch.global_size=8"),
        ("model.rope_theta=500.0", "model.rope_theta=10000.0"),
    ],
)
def test_resume_refuses_edited_settings(tmp_path, edited, stored):
    """Refuse the resume, because it would silently train with other settings, such as another learning rate."""
    run_dir = tmp_path / "out"
    train_session(run_dir, "run.steps=2")
    with pytest.raises(UserError) as caught:
        open_session(run_dir, "run.steps=4", edited)
    message = str(caught.value)
    assert f"checkpoint step-00000002 was saved with {stored}." in message
    assert f"config.yaml has {edited}: the file was edited or is damaged." in message
    assert f"train from={run_dir} weights={run_dir} {edited}" in message
