"""Loader of a peft adapter into a rank's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from gangline.model.tree import Shape
from gangline.plan import Plan
from gangline.shard import Shard, name_model_array, parse_parameter
from gangline_finetune.lora.lengths import LENGTHS
from gangline_finetune.lora.peft import WEIGHTS
from gangline_models.hugging_face.read import load_pretrained


def load(
    directory: str,
    names: Mapping[str, str],
    shapes: Mapping[str, Shape],
    shards: Sequence[Shard],
    plan: Plan,
    base: str | None,
) -> None:
    """Fill the shards of adapter parameters from a peft adapter.

    names: parameter -> peft's name. shapes: shapes of all parameters of the model. base: directory of the base
    model's weights, which DoRA requires.
    """
    from safetensors import safe_open

    with safe_open(Path(directory).expanduser() / WEIGHTS, framework="pt") as file, torch.no_grad():
        for shard in shards:
            name = parse_parameter(shard.name)
            if name not in names:
                continue
            part = file.get_slice(names[name])[shard.box.slices].to(shard.local.dtype)
            if name.endswith(LENGTHS):
                assert base is not None, "checked before the start"
                weight = f"{name.removesuffix(LENGTHS)}.weight"
                part = part - _compute_base_lengths(base, weight, shapes[weight], shard, plan)
            shard.local.copy_(part)


def _compute_base_lengths(base: str, weight: str, shape: Shape, like: Shard, plan: Plan) -> torch.Tensor:
    """Compute the row norms of a base weight, for the rows in the shard `like`."""
    (rows,) = like.box.slices
    w = torch.empty(rows.stop - rows.start, shape[1], dtype=torch.float32)
    name, offset = name_model_array(weight), (rows.start, 0)
    load_pretrained(base, [Shard(name, shape, w.dtype, offset, w)], plan)
    return w.norm(dim=1).to(like.local)
