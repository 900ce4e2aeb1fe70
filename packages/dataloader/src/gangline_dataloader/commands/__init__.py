"""The command `gangline data`: prepare, verify and show a corpus. Imports no torch.

Each subcommand is a module, which is imported when the subcommand runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline import UserError
from gangline.cli.verbs import run_verb

VERBS = {
    "prepare": "text, JSONL or Parquet -> clean, without duplicates, as tokens",
    "verify": "read every byte of a token store and name what is damaged",
    "show": "what a token store holds, or a sample of a run as text",
    "samples": "samples and documents of a step of a run",
    "export": "a token store as Megatron-LM's .bin and .idx",
    "tokenizer": "train a byte-level BPE on texts",
}


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `gangline data` and return its exit code: 0 for success, 1 if files are damaged."""
    return run_verb("data", VERBS, __name__, argv)


def check_out(out: str) -> None:
    """Raise UserError if `--out` is empty (which would mean the current directory) or a URL."""
    if not out:
        raise UserError("--out '' must be a path.", "It is empty: a variable of the shell may be unset.")
    if "://" in out:
        raise UserError(
            f"--out {out} is a URL.",
            "A store is made on a disk, where a file can be renamed once it is whole.",
            "Name a directory here, and copy what is in it there: a run reads it from the URL as it is.",
        )
