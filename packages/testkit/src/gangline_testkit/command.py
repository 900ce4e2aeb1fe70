"""Conformance suite for commands of `gangline` (hook `gangline_commands`)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import ClassVar

from gangline.plugin.registry import installed, load
from gangline_testkit.suite import LONGEST_SUMMARY, check_success

_TORCH_FREE = """
import sys
from gangline.cli.main import main
code = 0
try:
    code = main(sys.argv[1:])
except SystemExit as done:
    code = done.code
assert not code, f"exit code {code}"
assert "torch" not in sys.modules, "torch is imported"
"""


class CommandSuite:
    """Conformance suite for commands; subclass it with ``choice = "gangline mine"``."""

    choice: ClassVar[str]
    can: ClassVar[set[str]] = set()
    CLAIMS: ClassVar[dict[str, str]] = {}

    @property
    def verb(self) -> str:
        return self.choice.removeprefix("gangline ")

    def test_command_is_listed_with_a_short_summary(self) -> None:
        summary = installed().get_commands()[self.verb].summary
        assert summary.strip() == summary
        assert 0 < len(summary) <= LONGEST_SUMMARY, (
            f"the summary has {len(summary)} characters; allowed: 1 to {LONGEST_SUMMARY}"
        )

    def test_run_path_resolves(self) -> None:
        run = installed().get_commands()[self.verb].run
        assert callable(load(run)), f"run={run} is not a function"

    def test_help_is_printed_without_torch(self) -> None:
        """Check that `gangline VERB --help` prints the usage without importing torch, and exits with 0."""
        words = [sys.executable, "-c", _TORCH_FREE, self.verb, "--help"]
        process = subprocess.run(words, capture_output=True, text=True, timeout=120, env=os.environ)
        check_success(process)
        assert self.verb in process.stdout, f"the help does not contain the command {self.verb!r}: {process.stdout!r}"
