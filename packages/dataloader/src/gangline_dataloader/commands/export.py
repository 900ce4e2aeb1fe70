"""`gangline data export DIR --out NAME`: export a token store as Megatron-LM's NAME.bin and NAME.idx."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gangline import UserError
from gangline_dataloader.commands import check_out
from gangline_dataloader.store.external.megatron import write
from gangline_dataloader.store.local import LocalTokens


def run(argv: Sequence[str]) -> int:
    """Write the .bin and .idx files. Raises UserError if one of the files exists, or the store holds conversations."""
    words = argparse.ArgumentParser(
        prog="gangline data export", description="Write a token store in Megatron-LM's format: NAME.bin and NAME.idx."
    )
    words.add_argument("store", metavar="DIR")
    words.add_argument("--out", required=True, metavar="NAME", help="path of the output files, without .bin and .idx")
    options = words.parse_args(list(argv))
    check_out(options.out)
    store, out = LocalTokens(options.store), Path(options.out).expanduser()
    out = out.with_suffix("") if out.suffix in (".bin", ".idx") else out
    if store.masked:
        raise UserError(
            f"{options.store} holds conversations, and Megatron-LM's format has no loss mask.",
            "Megatron-LM would also train on the messages of users.",
            f"To train on the assistant's messages only:  train data=tokens data.path={options.store}",
        )
    for suffix in (".bin", ".idx"):
        if out.with_name(out.name + suffix).exists():
            raise UserError(f"{out}{suffix} already exists.", "Choose another --out, or delete the file.")
    write(out, store)
    print(f"{out}.bin, {out}.idx: {store.documents} documents, {store.total / 1e6:.4g} M tokens")
    return 0
