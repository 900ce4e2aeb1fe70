"""`gangline ckpt average`: write the mean of several checkpoints' weights as a checkpoint that a run starts from.

Each chunk of each array is read from every checkpoint, summed in float64 in the order of the arguments, and rounded
once (Izmailov et al., arXiv 1803.05407; Wortsman et al., arXiv 2203.05482). Memory holds one chunk at a time.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gangline import UserError
from gangline.config.values import override
from gangline.shard import is_of_model
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.weights import place_for, write_weights
from gangline_ckpt_zarr.commands.where import PLACES, Copy, find_places, make_parser
from gangline_ckpt_zarr.format.dtypes import map_dtype
from gangline_ckpt_zarr.load.read_plan import Target
from gangline_ckpt_zarr.load.reader import read_target

if TYPE_CHECKING:
    from gangline.shard import Shard


def run(argv: Sequence[str]) -> int:
    """Write the mean as step-00000000 and print the command to train from it. Raises UserError, BadCheckpoint."""
    words = make_parser(
        "average",
        "Write the mean of checkpoints' weights, summed in float64, as a checkpoint that a run can start from.",
    )
    words.add_argument("places", metavar="CHECKPOINT", nargs="+", help=f"two or more checkpoints, each as {PLACES}")
    words.add_argument(
        "-o", "--out", metavar="DIR", required=True, help="new run directory, or a URL for its checkpoints"
    )
    options = words.parse_args(list(argv))

    from gangline.config.serial import from_dict

    places = find_places(options.places)
    if len(places) < 2:
        raise UserError(
            f"average needs at least two checkpoints, got {len(places)}.",
            f"Name a checkpoint as {PLACES}.",
        )
    copies = [place.select_tier(options.tier).copy() for place in places]
    shapes = _check_same_model(copies)
    out = options.out.rstrip("/")
    _check_out(out)
    document = copies[0].meta.document
    config = document.get("config")
    if not config:
        raise UserError(
            f"the model of {copies[0].store.url} is unknown.", "The checkpoint contains no run configuration."
        )
    base = document.get("base") or {}
    write_weights(
        place_for(out),
        shapes,
        from_dict(config),
        config,
        lambda chunks: _fill(chunks, copies, shapes),
        base=base,
        model=document.get("model") if base else None,
    )
    print(f"{out}: mean of {text.format_count(len(copies), 'checkpoint')}, {text.format_count(len(shapes), 'array')}")
    integer_names = [
        name for name, (_, dtype) in shapes.items() if not _is_float(dtype) and not _holds_codes(name, shapes)
    ]
    if integer_names:
        place = text.place(copies[-1].store.url)
        print(f"{', '.join(integer_names[:3])}: integer arrays have no mean; copied from {place}")
    command = [
        f"from={places[0].run_dir or 'RUN_DIR'}",
        override("checkpoint.path" if "://" in out else "run.dir", out),
    ]
    print(f"\ntrain {shlex.join(command)}")
    return 0


def _check_out(out: str) -> None:
    """Raise UserError if the output exists already or is inside a run directory."""
    if "://" in out:
        return
    path = Path(text.resolve_path(out))
    if os.path.lexists(path):
        raise UserError(f"{out} exists already, and average does not overwrite.", "Name a new directory:  --out=DIR")
    run = next((place for place in path.parents if (place / "config.yaml").exists()), None)
    if run is not None:
        raise UserError(
            f"{out} is inside the run directory {run}.",
            "The average is the first checkpoint of a new run.",
            "Name a directory outside of that run:  --out=DIR",
        )


def _check_same_model(copies: Sequence[Copy]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return (shape, dtype) of every model array. Raises UserError if `copies` differ in these, BadCheckpoint."""
    first = copies[0]
    shapes = _read_weight_shapes(first)
    if not shapes:
        raise UserError(f"{first.store.url} contains no model weights.")
    for copy in copies[1:]:
        if (copy_shapes := _read_weight_shapes(copy)) != shapes:
            name = next(name for name in {**shapes, **copy_shapes} if copy_shapes.get(name) != shapes.get(name))
            here, there = (f"{of[name][0]} {of[name][1]}" if name in of else "absent" for of in (shapes, copy_shapes))
            raise UserError(
                f"{first.store.url} and {copy.store.url} are checkpoints of different models.",
                f"Array {name}: {here} in the first, {there} in the second.",
                "Only checkpoints of one model can be averaged.",
            )
        for field in sorted(_get_model_fields(first).keys() | _get_model_fields(copy).keys()):
            one, other = _get_model_fields(first).get(field), _get_model_fields(copy).get(field)
            if one != other:
                raise UserError(
                    f"{first.store.url} and {copy.store.url} are checkpoints of different models.",
                    f"Model configuration: {field} is {one} in the first, {other} in the second.",
                    "Only checkpoints of one model can be averaged.",
                )
        one, other = (of.meta.document.get("base") or {} for of in (first, copy))
        if one.get("fingerprint") != other.get("fingerprint"):
            raise UserError(
                f"{first.store.url} and {copy.store.url} were trained on different base weights.",
                f"Fingerprints of the omitted base weights: {one.get('fingerprint')} and {other.get('fingerprint')}.",
                "Only checkpoints trained on the same base weights can be averaged.",
            )
    return shapes


def _read_weight_shapes(copy: Copy) -> dict[str, tuple[tuple[int, ...], str]]:
    layouts = copy.check_sizes().registry.layouts
    return {name: (layout.shape, layout.dtype) for name, layout in layouts.items() if is_of_model(name)}


def _get_model_fields(copy: Copy) -> Mapping[str, Any]:
    """Return the configuration of the model and of its edits, without the source of its initial weights."""
    from gangline.config.serial import from_dict

    config = copy.meta.document.get("config") or {}
    fields = {name: value for name, value in (config.get("model") or {}).items() if name != "weights"}
    return fields | ({f"edit {name}": edit for name, edit in from_dict(config).edits.items()} if config else {})


def _fill(chunks: Iterator[Shard], copies: Sequence[Copy], shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Fill chunks with means. Raises BadCheckpoint for a bad chunk, UserError if low-bit codes differ."""
    import torch

    for chunk in chunks:
        stored_dtype = map_dtype(shapes[chunk.name][1])
        if not _is_float(shapes[chunk.name][1]):
            last = _read(copies[-1], chunk, stored_dtype)
            if _holds_codes(chunk.name, shapes):
                _check_same_codes(last, chunk, copies, stored_dtype)
            chunk.local.copy_(torch.from_numpy(last))
            continue
        total = np.zeros(chunk.box.shape, np.float64)
        for copy in copies:
            total += _read(copy, chunk, stored_dtype)
        total /= len(copies)
        chunk.local.copy_(torch.from_numpy(total))


def _holds_codes(name: str, shapes: Mapping[str, Any]) -> bool:
    """Return whether an integer array contains low-bit codes of weights, next to their `scales` (`Plan.low_bit`)."""
    return not _is_float(shapes[name][1]) and f"{name.rpartition('.')[0]}.scales" in shapes


def _check_same_codes(codes: np.ndarray, chunk: Shard, copies: Sequence[Copy], stored: str) -> None:
    for copy in copies[:-1]:
        if not np.array_equal(_read(copy, chunk, stored), codes):
            raise UserError(
                f"{copy.store.url} and {copies[-1].store.url} store different low-bit codes in {chunk.name}.",
                "Codes are quantized weights: they have no mean, and only the scales of their own checkpoint fit them.",
                "Convert each checkpoint with gangline ckpt export --merge and import, and average the results.",
            )


def _read(copy: Copy, chunk: Shard, stored: str) -> np.ndarray:
    array = np.empty(chunk.box.shape, stored)
    read_target(copy.meta, copy.store, Target(chunk.name, chunk.box, array))
    return array


def _is_float(dtype: str) -> bool:
    return "float" in dtype
