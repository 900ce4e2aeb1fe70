"""`gangline ckpt import`: convert a Hugging Face directory, chunk by chunk, to a checkpoint that a run starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gangline_ckpt_zarr.commands.weights import place_for, write_weights
from gangline_ckpt_zarr.commands.where import make_parser

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_ckpt_zarr.stores.base import ObjectStore


def run(argv: Sequence[str]) -> int:
    """Write step-00000000 with the weights alone, and print the command to train from it."""
    words = make_parser(
        "import", "Convert a Hugging Face directory to a checkpoint that a run can start from.", tier=False
    )
    words.add_argument("directory", metavar="DIR", help="Hugging Face directory with config.json and safetensors")
    words.add_argument("out", metavar="RUN_DIR", help="new run directory, or a URL for its checkpoints")
    options = words.parse_args(list(argv))

    from gangline.config.compose import compose_one
    from gangline.config.values import override
    from gangline_models.hugging_face.commands import format_train_command, list_overrides

    directory, out = Path(options.directory).expanduser().resolve(), options.out.rstrip("/")
    # the weights will be in the new checkpoint
    settings = [word for word in list_overrides(directory) if not word.startswith("model.weights=")]
    settings = [*settings, "checkpoint=zarr"]
    _write(place_for(out), directory, compose_one(settings))
    place = override("checkpoint.path" if "://" in out else "run.dir", out)
    print(format_train_command([*settings, place]))
    return 0


def _write(store: ObjectStore, directory: Path, trained: Run) -> None:
    from gangline.config.serial import to_dict
    from gangline.model.build import construct
    from gangline.model.compose import compose_model
    from gangline.model.init import list_shards
    from gangline.shard import name_dtype
    from gangline_models.hugging_face.read import load_pretrained

    tree, plan = compose_model(trained)
    arrays = list_shards(construct(tree), plan)  # allocates no memory for the weights
    shapes = {shard.name: (shard.global_shape, name_dtype(shard.dtype)) for shard in arrays}
    write_weights(
        store,
        shapes,
        trained,
        to_dict(trained),
        lambda chunks: load_pretrained(directory, chunks, plan, trained.seed),
    )
