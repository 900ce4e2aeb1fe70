"""`gangline data tokenizer INPUT... --vocab-size N --out FILE`: train a byte-level BPE tokenizer on texts.

Byte pair encoding (Sennrich et al., arXiv 1508.07909) over bytes (GPT-2, Radford et al. 2019), trained by the
tokenizers library: every text can be encoded, and decodes to the same bytes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gangline import UserError
from gangline_dataloader.commands import check_out
from gangline_dataloader.prepare.clean import DEFAULT, clean_text
from gangline_dataloader.prepare.documents import NotText, read_documents
from gangline_dataloader.prepare.inputs import Input, list_inputs
from gangline_dataloader.prepare.rule import Dropped

END_OF_TEXT = "<|endoftext|>"
LEAST = 257  # minimum vocabulary size: one token for each byte, and the end-of-text token


def run(argv: Sequence[str]) -> int:
    """Train a tokenizer and write it. Raises UserError for a vocabulary below `LEAST`, or if `--out` exists."""
    words = argparse.ArgumentParser(
        prog="gangline data tokenizer",
        description="Train a byte-level BPE tokenizer. Equal texts give an equal file.",
    )
    what = "files, directories, globs or URLs: text, JSONL, Parquet (default: source of Python's standard library)"
    words.add_argument("inputs", nargs="*", metavar="INPUT", help=what)
    words.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help=f"vocabulary size in tokens, at least {LEAST}"
    )
    words.add_argument("--out", required=True, metavar="FILE", help="path of the tokenizer.json to write")
    words.add_argument("--field", default="text", help="field of JSONL or Parquet rows (default: %(default)s)")
    options = words.parse_args(list(argv))
    check_out(options.out)
    out = Path(options.out).expanduser()
    if options.vocab_size < LEAST:
        raise UserError(
            f"--vocab-size {options.vocab_size}: expected {LEAST} or more.",
            "A byte-level vocabulary has 256 bytes and an end-of-text token.",
        )
    if out.exists():
        raise UserError(
            f"--out {options.out} already exists.",
            "If the file were overwritten, stores prepared with the old tokenizer could no longer be decoded.",
            "Choose another --out, or delete the file.",
        )
    if not out.parent.is_dir():
        raise UserError(f"--out {options.out}: the directory {out.parent} does not exist.", f"mkdir -p {out.parent}")
    size = train(list_inputs(options.inputs, say=print), options.field, options.vocab_size, out)
    note = (
        ""
        if size == options.vocab_size
        else f" instead of {options.vocab_size}, because the texts contain no more pairs to merge"
    )
    print(f"{options.out}: vocabulary size {size}{note}")
    print(f"gangline data prepare INPUT --tokenizer {options.out} --out DIR")
    return 0


def train(files: Sequence[Input], field: str, vocab_size: int, out: Path) -> int:
    """Train a tokenizer on texts cleaned as by `prepare`, write it to `out`, and return its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_iterate_texts(files, field), trainer)
    waiting = out.with_name(f".{out.name}.{os.getpid()}")
    tokenizer.save(str(waiting))
    waiting.replace(out)
    return int(tokenizer.get_vocab_size())


def _iterate_texts(files: Sequence[Input], field: str) -> Iterator[str]:
    for file in files:
        try:
            for document in read_documents(file, field):
                text = clean_text(document.text, DEFAULT)
                if not isinstance(text, Dropped):
                    yield text
        except NotText:
            continue
