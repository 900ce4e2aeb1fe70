"""`gangline data`: prepare a corpus, check it, look at it. Nothing here imports torch.

Each verb is a module that is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from gangline.config.suggest import near
from gangline.errors import UserError

VERBS = {
    "prepare": "text, JSONL or Parquet -> clean, without doubles, as tokens",
    "verify": "read every byte of a token store and name what is damaged",
    "show": "what a token store holds, or a sample of a run as text",
    "order": "which samples and documents a step of a run held",
    "tokenizer": "train a byte-level BPE on texts",
}

USAGE = """\
usage: gangline data VERB ...

{verbs}

gangline data VERB --help  says more."""


def main(argv: Sequence[str]) -> int:
    """The verb `gangline data`; 0 where all is well, 1 where something is damaged."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE.format(verbs="\n".join(f"  {verb:9} {text}" for verb, text in VERBS.items())))
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        raise UserError(f"there is no gangline data {verb}.", near(verb, VERBS), f"Choices: {', '.join(VERBS)}.")
    return int(import_module(f"{__name__}.{verb}").run(rest))
