"""Plain `train` without arguments, on the text that every machine with Python has; compared with the README."""

from __future__ import annotations

import json
import subprocess
import sys

import pages
import pytest


@pytest.mark.nightly
def test_main_job_learns_and_matches_readme(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "gangline.cli.train"], cwd=tmp_path, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr
    [metrics] = tmp_path.glob("runs/*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    held_out = records[-1]["validation_loss"]
    entropy = 3.2  # entropy of single bytes in Python's own source, in nats; 3.24 for Python 3.11
    assert held_out < entropy - 1
    assert records[-1]["loss"] < held_out
    [shown] = [
        expected
        for block in pages.blocks(pages.ROOT / "README.md")
        if block.language == "console"
        for command, expected in pages.commands(block.text)
        if command == ".venv/bin/train"
    ]
    assert pages.pattern(shown).fullmatch(done.stdout.rstrip() + "\n"), done.stdout
