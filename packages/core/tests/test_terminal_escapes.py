"""Text from files in the terminal: control sequences are escaped, and encodings are handled."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from gangline.cli import run_guarded
from gangline.cli.main import main
from gangline.cli.terminal import TerminalStream
from gangline.cli.train import read
from gangline.config.check import find_problems
from gangline.config.defaults import build_default_run
from gangline.errors import UserError
from gangline.run.directory import RunDirectory

TITLE = "\x1b]0;pwn\x07"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch):
    """Replace stdout and stderr by a terminal; called in the test, because pytest sets its own streams before it."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (TITLE, "\\x1b]0;pwn\\x07"),
        ("\x1bP+q\x9b1m\x7f\u202e", "\\x1bP+q\\x9b1m\\x7f\\u202e"),
        ("\x1b[1;31mred\x1b[0m\x1b[2K\r\ta\n", "\x1b[1;31mred\x1b[0m\x1b[2K\r\ta\n"),
    ],
)
def test_terminal_stream_passes_only_color_and_cursor_codes(text, written):
    stream = io.StringIO()
    assert TerminalStream(stream).write(text) == len(text)
    TerminalStream(stream).writelines([text])
    assert stream.getvalue() == written * 2
    assert TerminalStream(Terminal()).isatty()


def test_command_escapes_prints_and_errors_on_a_terminal(monkeypatch):
    stream = terminal(monkeypatch)

    def body(argv):
        print(TITLE)
        raise UserError("\x1b[31mred", TITLE)

    assert run_guarded("train", body, []) == 2
    assert sys.stdout is stream
    assert stream.getvalue() == "\\x1b]0;pwn\\x07\ntrain: \\x1b[31mred\n  \\x1b]0;pwn\\x07\n"


def test_run_table_escapes_run_names(core_alone, monkeypatch, tmp_path):
    for name in ("a", "b"):
        directory = RunDirectory.create(build_default_run(run={"dir": str(tmp_path / name), "name": f"{name}\x1b[8m"}))
        directory.unlock()
    stream = terminal(monkeypatch)
    assert main(["runs", str(tmp_path)]) == 0
    assert "a\\x1b[8m" in stream.getvalue()
    assert "\x1b[8m" not in stream.getvalue()


def test_unprintable_run_name_is_refused():
    (problem,) = find_problems(build_default_run(run={"name": TITLE}))
    assert "must be printable text in one line" in problem.what


def test_unencodable_letter_is_printed_escaped(tmp_path):
    RunDirectory.create(build_default_run(run={"dir": str(tmp_path / "a"), "name": "é"})).unlock()
    command = [sys.executable, "-m", "gangline", "runs", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=240)
    assert b"\\xe9" in done.stdout, done.stderr


def test_run_files_are_utf8_in_every_locale(tmp_path):
    code = (
        "import sys\nfrom gangline.config.defaults import build_default_run\n"
        "from gangline.run.directory import RunDirectory\n"
        "RunDirectory.create(build_default_run(run={'dir': sys.argv[1], 'name': '\\xe9'}), ['\\xe9'])"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], env={**os.environ, **locale}, check=True, timeout=240
    )
    assert "name: é" in (tmp_path / "a" / "config.yaml").read_text(encoding="utf-8")
    assert RunDirectory.open(tmp_path / "a").run().job.name == "é"


def test_undecodable_argument_is_refused():
    with pytest.raises(UserError, match="is not text in this locale's encoding") as caught:
        read(["run.name=\udcc3\udca9"])
    assert "\udcc3" not in str(caught.value)
