"""`gangline ckpt export`: write a checkpoint's model as a Hugging Face directory, one array in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from gangline import UserError
from gangline.checkpoint.base_weights import BaseWeights
from gangline.model.compose import compose_model
from gangline.shard import Box
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.where import PLACES, Copy, find_place, make_parser
from gangline_ckpt_zarr.format.dtypes import map_dtype
from gangline_ckpt_zarr.load.read_plan import Target
from gangline_ckpt_zarr.load.reader import read_target
from gangline_models.hugging_face.commands import add_output, write_model

if TYPE_CHECKING:
    import torch

    from gangline.config import Run


def run(argv: Sequence[str]) -> int:
    """Write config.json and safetensors. No run directory is needed: a checkpoint holds its configuration."""
    words = make_parser("export", "Write the model of a checkpoint as a Hugging Face directory.")
    words.add_argument("place", metavar="CHECKPOINT", nargs="+", help=PLACES)
    add_output(words)
    options = words.parse_args(list(argv))
    copy = find_place(options.place).select_tier(options.tier).copy()
    run, record = _run(copy), copy.meta.document.get("base", {})
    base = BaseWeights(run, *compose_model(run))
    arrays, read, check = base.complete(copy.check_sizes().shapes, partial(_read_arrays, copy), record, copy.store.url)
    count = write_model(options, run, copy.store.url, arrays, read, check)
    print(f"{options.out}: model of {text.place(copy.store.url)}, {count} tensors in {options.dtype}")
    return 0


def _run(copy: Copy) -> Run:
    """Return the run that saved the checkpoint. Raises UserError if the checkpoint holds no configuration."""
    from gangline.config.serial import from_dict

    config = copy.meta.document.get("config")
    if not config:
        raise UserError(f"the model of {copy.store.url} is unknown.", "The checkpoint contains no run configuration.")
    return from_dict(config)


def _read_arrays(copy: Copy, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full array) for each array. The next array overwrites its memory. Raises BadCheckpoint."""
    import torch

    sizes = {name: prod(shape) * _get_dtype(copy, name).itemsize for name, shape in shapes.items()}
    memory = np.empty(max(sizes.values(), default=0), np.uint8)
    with text.show_progress("export", sum(sizes.values())) as advance:
        for name, shape in shapes.items():
            whole = memory[: sizes[name]].view(_get_dtype(copy, name)).reshape(shape)
            box = Box((0,) * len(shape), shape)
            read_target(copy.meta, copy.store, Target(name, box, whole))
            yield name, torch.from_numpy(whole)
            advance(sizes[name])


def _get_dtype(copy: Copy, name: str) -> np.dtype:
    return np.dtype(map_dtype(copy.meta.registry[name].dtype))
