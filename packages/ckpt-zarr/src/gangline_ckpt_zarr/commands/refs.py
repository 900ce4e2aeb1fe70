"""`gangline ckpt refs`: write refs.json, through which stock zarr opens a checkpoint as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gangline import UserError
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.where import PLACES, find_place, make_parser
from gangline_ckpt_zarr.format.native import NativeMeta
from gangline_ckpt_zarr.format.references import AT, REFERENCES, build_references


def run(argv: Sequence[str]) -> int:
    """Write refs.json and print the Python call that opens the checkpoint. Raises UserError, BadCheckpoint."""
    words = make_parser(
        "refs", "Write refs.json, with which stock zarr opens a checkpoint through fsspec's reference file system."
    )
    words.add_argument("place", metavar="CHECKPOINT", nargs="+", help=PLACES)
    words.add_argument("--output", metavar="FILE", help=f"file to write; default: {REFERENCES} in the checkpoint")
    options = words.parse_args(list(argv))
    copy = find_place(options.place).select_tier(options.tier).copy()
    if isinstance(copy.meta, NativeMeta):
        raise UserError(
            f"{copy.store.url} is native zarr and needs no refs.json.",
            f'To open the checkpoint directly:  zarr.open_group("{copy.store.url}", mode="r")',
        )
    content = build_references(copy.content, copy.meta, AT)
    json_bytes = json.dumps({"version": 1, "templates": {"at": copy.store.url}, **content}).encode()
    if options.output:
        Path(options.output).write_bytes(json_bytes)
        place = options.output
    else:
        copy.store.delete(REFERENCES)  # existing references may name an earlier URL
        copy.store.commit(REFERENCES, json_bytes)
        place = f"{copy.store.url}/{REFERENCES}"
    print(f"{text.place(place)}: {text.format_count(len(content['refs']), 'reference')}, {text.size(len(json_bytes))}")
    print(f"\nzarr.open_group({open_arguments(place, copy.store.url)})")
    return 0


def open_arguments(references: str, url: str) -> str:
    """Return the arguments of zarr.open_group that open the checkpoint at `url` through `references`."""
    options: dict[str, object] = {"fo": references}
    scheme, sign, _ = url.partition("://")
    if sign:
        options |= {"remote_protocol": scheme, "remote_options": {"asynchronous": True}}
    return f'"reference://", mode="r", storage_options={json.dumps(options).replace("true", "True")}'
