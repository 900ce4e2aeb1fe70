"""The command `gangline data`: prepare, verify and show a corpus. Imports no torch.

Each subcommand is a module, which is imported when the subcommand runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline import UserError
from gangline.cli.verbs import run_verb

VERBS = {
    "prepare": "clean, deduplicate and tokenise text, JSONL or Parquet into a token store",
    "verify": "read every byte of a token store and list the damaged files",
    "show": "describe a token store, or print a sample of a run as text",
    "samples": "list the samples and documents of a training step",
    "export": "write a token store in Megatron-LM's format, .bin and .idx",
    "tokenizer": "train a byte-level BPE tokenizer on texts",
}


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `gangline data` and return its exit code: 0 for success, 1 if files are damaged."""
    return run_verb("data", VERBS, __name__, argv)


def check_out(out: str) -> None:
    """Raise UserError if `--out` is empty (which would mean the current directory) or a URL."""
    if not out:
        raise UserError("--out must be a path, and is empty.", "A shell variable in the command may be unset.")
    if "://" in out:
        raise UserError(
            f"--out {out} must be a path on a local or shared file system, not a URL.",
            "Files are written under temporary names and renamed when complete, which object stores do not support.",
            "Choose a directory for --out, then copy its files to the URL: a run reads a store from a URL.",
        )
