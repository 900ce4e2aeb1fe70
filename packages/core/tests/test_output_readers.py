"""Output of a run without a reader: `train | head`, a closed terminal."""

from __future__ import annotations

import io
import os
import sys

import pytest

from gangline.launch.output import outlive_readers
from gangline_basics.launch.rank_log import Copied


@pytest.fixture
def closed_pipe():
    """Yield a text stream to a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        yield stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)


def test_output_continues_in_log_after_closed_pipe(closed_pipe):
    log = io.StringIO()
    stream = Copied(closed_pipe, log)
    for number in range(2):
        print(f"line {number}", file=stream, flush=True)
    assert log.getvalue() == (
        "line 0\ntrain: note: writing to the terminal failed: Broken pipe; further output is only in this log\nline 1\n"
    )


def test_launcher_output_without_reader_is_discarded(closed_pipe, monkeypatch):
    monkeypatch.setattr(sys, "stderr", closed_pipe)
    with outlive_readers():
        print("rank 1 failed first", file=sys.stderr, flush=True)
        print("buffered until the end", file=sys.stderr)
    assert sys.stderr is closed_pipe


def test_output_to_full_disk_raises_error(monkeypatch):
    with open("/dev/full", "w") as full:
        stream = Copied(full, io.StringIO())
        stream.write("line\n")
        with pytest.raises(OSError, match="No space left"):
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_run_with_closed_stdout_trains_to_end(runs):
    process = runs.fork("run.dir=out", "checkpoint=torch", "track=[jsonl,console]")
    process.stdout.close()
    assert process.wait(runs.seconds) == 0
    log = (runs.directory / "out" / "logs" / "rank-00000.log").read_text()
    assert runs.read_records("out")[-1]["step"] == 6
    assert "Broken pipe" in log
    assert "checkpoint step-00000006" in log
