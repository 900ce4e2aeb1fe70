"""Loading of pretrained weights from a Hugging Face directory into a rank's shards, and checks before loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.errors import UserError
from gangline.model.tree import get_parameter_shapes
from gangline.plan import Plan
from gangline.shard import parse_parameter
from gangline_models.hugging_face.names import HFTensor, Shapes, find_hf_tensors, find_layers, find_unknown_names
from gangline_models.hugging_face.tensors import Tensors

if TYPE_CHECKING:
    from gangline.model.tree import Node
    from gangline.shard import Shard


LARGER = 100  # maximum ratio of the model's parameter count to the number of elements in the directory's weights
LANES = 2  # number of shards that are filled concurrently: one is read while another is converted


def load_pretrained(directory: str | Path, shards: Iterable[Shard], plan: Plan, seed: int = 0) -> None:
    """Fill this rank's `model/...` shards in place from a Hugging Face directory, reading only the shards' rows.

    Parameters without a Hugging Face tensor, or with missing optional tensors, are initialised by `seed`, as without a
    directory. Shards of a list are filled concurrently. Other iterables are asked for the next shard when the
    previous shard is full.
    Raises UserError if a tensor is missing, has another shape, or does not belong to this model.
    """
    from gangline.model.init import fill_as_stored, initialise

    with Tensors(directory) as tensors:
        _refuse_unknown_tensors(tensors, plan)
        _refuse_untied(tensors, plan)

        def read(shard: Shard) -> None:
            hf_tensors = _find_stored_tensors(tensors, plan, shard)
            if not hf_tensors:
                initialise([shard], plan, seed)
            for hf_tensor in hf_tensors:
                _fill(tensors, hf_tensor, shard, plan)

        fill_each(lambda shard: fill_as_stored(shard, plan, read), shards)


def check_pretrained(directory: str | Path, shards: Iterable[Shard], plan: Plan) -> None:
    """Check that `load_pretrained` can fill these shards, without reading the weights.

    shards: all shards of the complete model; they may be on the meta device. Reads headers and file sizes; with tied
    embeddings also a separate head, if there is one. Raises UserError as `load_pretrained`, and for a tensor that
    matches no parameter of this model. Shards stored in fewer bits are not supported.
    """
    shards = list(shards)
    with Tensors(directory) as tensors:
        _refuse_unknown_tensors(tensors, plan, {parse_parameter(shard.name): shard.global_shape for shard in shards})
        _refuse_untied(tensors, plan)
        for shard in shards:
            for hf_tensor in _find_stored_tensors(tensors, plan, shard):
                _check(tensors, hf_tensor, shard, plan)


def refuse_larger(directory: str | Path, tree: Node) -> None:
    """Raise UserError if the model has over `LARGER` times as many parameters as the directory. Reads headers only.

    Such a model is refused before it is built, without a list of the tensors that differ.
    """
    with Tensors(directory) as tensors:
        weight_count = sum(prod(tensors.get_shape(name)) for name in tensors.files)
    parameter_count = sum(map(prod, get_parameter_shapes(tree).values()))
    if parameter_count > LARGER * max(weight_count, 1):
        raise UserError(
            f"{directory}/config.json describes a model of {parameter_count:,} parameters, far more than the weights.",
            f"The weights in the directory have {weight_count:,} elements.",
            "Check the sizes in config.json: hidden_size, vocab_size and the numbers of heads and layers.",
        )


def check_names(directory: str | Path, plan: Plan, shapes: Shapes) -> None:
    """Check that every tensor of a directory belongs to the model.

    shapes: shapes of the model's parameters and persistent buffers. Raises UserError for any other tensor.
    """
    with Tensors(directory) as tensors:
        _refuse_unknown_tensors(tensors, plan, shapes)


def _refuse_unknown_tensors(tensors: Tensors, plan: Plan, shapes: Shapes | None = None) -> None:
    left_over = find_unknown_names(plan, tensors.files, shapes)
    if not left_over:
        return
    why = ", ".join(left_over[:4]) + (f" and {len(left_over) - 4} more" if len(left_over) > 4 else "") + "."
    fix = ""
    if behind := [layer for layer in find_layers(plan, left_over) if layer >= plan.layers]:
        layers = f"{plan.layers} layers (num_hidden_layers or n_layer)"
        why += f" config.json gives the model {layers}; the files hold layer {max(behind)}, counted from 0."
        fix = f"Set the number of layers in config.json to {max(behind) + 1}, or remove the tensors from the files."
    raise UserError(f"{tensors.directory} holds weights that match no parameter of this model.", why, fix)


def _refuse_untied(tensors: Tensors, plan: Plan) -> None:
    """Raise UserError for a separate head with tied embeddings: transformers uses the head, this model would not.

    A head equal to the embedding is accepted, since some tools write this copy.
    """
    for alias, owner in plan.tied:
        head, embedding = (
            next(filter(None, (rule.translate(name) for rule in plan.names)), "") for name in (alias, owner)
        )
        both = head in tensors.files and embedding in tensors.files
        if both and not _is_same_tensor(tensors, head, embedding):
            raise UserError(
                f"{tensors.directory}: {head} differs from {embedding}, although config.json ties both tensors.",
                "transformers uses both tensors, but a tied model here uses only the embedding.",
                "Set tie_word_embeddings to false in config.json (model.tied=false), or remove the tensor of the head.",
            )


def _is_same_tensor(tensors: Tensors, one: str, other: str) -> bool:
    """Return whether two tensors have equal shape and bits; only a few rows are in memory at a time."""
    import torch

    if tensors.get_shape(one) != tensors.get_shape(other) or tensors.get_dtype(one) != tensors.get_dtype(other):
        return False
    box = tuple(slice(0, size) for size in tensors.get_shape(one))
    pairs = zip(tensors.iterate_blocks(one, box), tensors.iterate_blocks(other, box), strict=True)
    return all(torch.equal(rows.view(torch.uint8), rest.view(torch.uint8)) for (_, rows), (_, rest) in pairs)


def _find_stored_tensors(tensors: Tensors, plan: Plan, shard: Shard) -> list[HFTensor]:
    """Return the Hugging Face tensors of a shard's parameter; [] if the parameter is to be initialised by seed."""
    hf_tensors = find_hf_tensors(plan, _get_owner(plan, shard), shard.global_shape)
    return (
        []
        if all(hf_tensor.optional and hf_tensor.name not in tensors.files for hf_tensor in hf_tensors)
        else hf_tensors
    )


def _get_owner(plan: Plan, shard: Shard) -> str:
    return plan.get_owner(parse_parameter(shard.name))


def _check(tensors: Tensors, hf_tensor: HFTensor, shard: Shard, plan: Plan) -> None:
    shape = tensors.get_shape(hf_tensor.name)
    if shape != hf_tensor.shape:
        raise UserError(
            f"{tensors.directory}: {hf_tensor.name} has shape {shape}.",
            f"For {_get_owner(plan, shard)} the shape must be {hf_tensor.shape}.",
        )
    dtype = tensors.get_dtype(hf_tensor.name)
    if "float" not in dtype and shard.dtype.is_floating_point:
        raise UserError(
            f"{tensors.directory}: {hf_tensor.name} holds values of dtype {dtype}.",
            f"{_get_owner(plan, shard)} is a floating-point weight; integers are codes of a quantised model.",
            "Download or export the model in float32, float16 or bfloat16.",
        )


def fill_each(fill: Callable[[Shard], None], shards: Iterable[Shard]) -> None:
    """Fill shards. Shards of a list are filled by `LANES` threads; a thread that has filled one takes the next.

    Shards of other iterables are filled one after another, since the producer may read a filled shard when the next
    shard is requested. Errors of `fill` are raised; the other threads then take no more shards.
    """
    if not isinstance(shards, Sequence):
        for shard in shards:
            fill(shard)
        return
    coming, failed = iter(shards), False

    def iterate_own() -> Iterator[Shard]:
        while not failed and (shard := next(coming, None)) is not None:  # next() is atomic for a list's iterator
            yield shard

    def run_lane() -> None:
        nonlocal failed
        try:
            for shard in iterate_own():
                fill(shard)
        except BaseException:
            failed = True
            raise

    with ThreadPoolExecutor(LANES, thread_name_prefix="read weights") as pool:
        lanes = [pool.submit(run_lane) for _ in range(LANES)]
    for one in lanes:
        one.result()


def _fill(tensors: Tensors, hf_tensor: HFTensor, shard: Shard, plan: Plan) -> None:
    import torch

    box, local = shard.box.slices, shard.local
    if hf_tensor.index is not None:
        if not box[0].start <= hf_tensor.index < box[0].stop:
            return
        local, box = local[hf_tensor.index - box[0].start], box[1:]
    if hf_tensor.transpose:
        local, box = local.mT, (*box[:-2], box[-1], box[-2])
    if hf_tensor.first is not None:
        dim, every = hf_tensor.dim, hf_tensor.every
        start, stop = box[dim].start * every + hf_tensor.first, box[dim].stop * every + hf_tensor.first
        box = (*box[:dim], slice(start, max(start, stop - every + 1), every), *box[dim + 1 :])
    _check(tensors, hf_tensor, shard, plan)
    if tensors.fill(hf_tensor.name, box, local):
        return
    with torch.no_grad():
        for first, rows in tensors.iterate_blocks(hf_tensor.name, box):
            (local[first : first + len(rows)] if local.dim() else local).copy_(rows)
