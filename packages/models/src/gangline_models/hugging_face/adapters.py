"""Adapters of wrapping edits (such as LoRA): merged into the weights that they wrap, or exported alone. Torch-free.

An edit defines how by `EditConfig.merge` and `EditConfig.extract_adapter`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.checkpoint.base_weights import Read, Shapes
from gangline.errors import UserError
from gangline.model.adapter import Adapter
from gangline.plan import SCALES

if TYPE_CHECKING:
    import torch

    from gangline.config.schema import EditConfig
    from gangline.plan import Plan


class Stored(Mapping[str, "torch.Tensor"]):
    """Parameters of a checkpoint by name, read lazily on access."""

    def __init__(self, shapes: Shapes, read: Read) -> None:
        self._shapes, self._read = shapes, read

    def __getitem__(self, name: str) -> torch.Tensor:
        ((_, tensor),) = self._read({name: self._shapes[name]})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def decode_kept(read: Read, shapes: Shapes, plan: Plan) -> Read:
    """Wrap `read` to decode int8 codes (`Plan.low_bit`) to weights. shapes: shapes of all checkpoint parameters."""
    if all(rule.dtype != "int8" for rule in plan.low_bit):
        return read

    def decode_weights(wanted: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
        from gangline_basics.model.low_bit import decode

        for name, tensor in read(wanted):
            if plan.get_dtype(name) == "int8":
                scales = f"{name.rpartition('.')[0]}{SCALES}"
                ((_, beside),) = read({scales: shapes[scales]})
                tensor = decode(tensor, beside)
            yield name, tensor

    return decode_weights


def merge_edits(read: Read, shapes: Shapes, edits: Mapping[str, EditConfig]) -> Read:
    """Wrap `read` to merge wrapping edits into each parameter. edits: group -> options, the innermost edit first.

    shapes: shapes of all parameters of the checkpoint. Raises UserError for an edit that cannot be merged.
    """
    parameters = Stored(shapes, read)

    def merge_arrays(wanted: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read(wanted):
            for group, options in edits.items():
                merged_tensor = options.merge(name, tensor, parameters)
                if merged_tensor is None:
                    raise UserError(
                        f"{group} cannot be merged into the weights: the edit does not implement `EditConfig.merge`."
                    )
                tensor = merged_tensor
            yield name, tensor

    return merge_arrays


def find_frozen_bits(shapes: Shapes, plan: Plan, base: str | None) -> int | None:
    """Return the lowest bit width to which frozen weights were rounded (`Plan.low_bit`); None: not rounded.

    shapes: shapes of all parameters. base: Hugging Face directory of the base weights; None: no directory. Weights that
    are bfloat16 in `base` are not rounded by bfloat16 storage. If `base` cannot be read, all are assumed to be rounded.
    """
    from gangline_models.hugging_face.names import find_hf_tensors
    from gangline_models.hugging_face.tensors import Tensors

    def is_in_base(name: str) -> bool:
        """Return whether the base directory stores the parameter in bfloat16."""
        return all(
            tensors.get_dtype(hf_tensor.name) == "bfloat16" for hf_tensor in find_hf_tensors(plan, name, shapes[name])
        )

    dtypes = {name: rule.dtype for name in shapes if (rule := plan.find_low_bit(name)) is not None}
    if "int8" in dtypes.values():
        return 8
    if dtypes and base is not None:
        with suppress(UserError, OSError, KeyError), Tensors(base) as tensors:
            if all(is_in_base(name) for name in dtypes):
                return None
    return 16 if dtypes else None


def write_apart(
    directory: str | Path, adapter: Adapter, arrays: Read, shapes: Shapes, dtype: str, base: str | None = None
) -> None:
    """Write an adapter to `directory` atomically. base: directory of the base model; None: unknown.

    Raises UserError if `directory` exists or cannot be written.
    """
    import torch
    from safetensors.torch import save_file

    target = Path(directory).expanduser()
    if target.exists():
        raise UserError(f"{target} already exists.", "gangline export does not overwrite.", "Name another directory.")
    adapter_shapes = {name: shapes[name] for name in adapter.names}
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        parameters, tensors = Stored(shapes, arrays), {}
        for name, tensor in arrays(adapter_shapes):
            changed_tensor = adapter.change(name, tensor, parameters) if adapter.change else tensor
            # copied, since the next tensor may reuse the memory
            tensors[adapter.names[name]] = changed_tensor.to(getattr(torch, dtype), copy=True).contiguous()
        save_file(tensors, partial / adapter.weights, {"format": "pt"})
        for name, content in adapter.files.items():
            if adapter.base and adapter.base[0] == name and base is not None:
                content = {**content, adapter.base[1]: str(Path(base).expanduser())}
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.rename(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written.", error.strerror or str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
