"""Commands `gangline export` and `gangline import`: a run's weights to a Hugging Face directory, and back."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.checkpoint.base import Checkpointer
from gangline.checkpoint.id import CheckpointId
from gangline.config.values import override, to_plain
from gangline.errors import UserError
from gangline.shard import is_of_model, parse_parameter
from gangline_basics.checkpoint.weights import add_weights, find_weights_under
from gangline_models.hugging_face.config import make_run_config_json, read_edited_config
from gangline_models.hugging_face.names import find_hf_tensors
from gangline_models.hugging_face.write import DTYPES, MAX_SHARD_BYTES, export

if TYPE_CHECKING:
    import torch

    from gangline.config.schema import EditConfig, ModelConfig, PartConfig, Run
    from gangline.plan import Plan
    from gangline_models.hugging_face.adapters import Read


def export_run(argv: Sequence[str]) -> int:
    """Run `gangline export RUN_DIR OUT`: write config.json and safetensors one array at a time; no model is built."""
    parser = argparse.ArgumentParser(
        prog="gangline export", description="Export the model of a run as a Hugging Face directory."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run directory")
    add_output(parser)
    parser.add_argument(
        "--checkpoint", metavar="ID", help="checkpoint to export, such as step-00000100 (default: the newest)"
    )
    options = parser.parse_args(list(argv))

    from gangline.checkpoint.base_weights import BaseWeights
    from gangline.model.compose import compose_model
    from gangline.plugin import registry
    from gangline.run.directory import RunDirectory

    run = RunDirectory.open(options.run_dir).run()
    checkpointer: Checkpointer = registry.build(run.checkpoint, run, None)
    id = _choose(checkpointer, options.run_dir, options.checkpoint)
    reader: Read = partial(_read_arrays, checkpointer, id, _compose_plan(run))
    base, record = BaseWeights(run, *compose_model(run)), checkpointer.read_document(id).get("base", {})
    arrays, read, check = base.complete(
        checkpointer.read_shapes(id), reader, record, f"checkpoint {id} of {options.run_dir}"
    )
    count = write_model(options, run, options.run_dir, arrays, read, check)
    print(f"{options.out}: {id} of {options.run_dir}, {count} tensors in {options.dtype}")
    return 0


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of `write_model`: choice of weights, output path and format."""
    parser.add_argument("out", metavar="OUT", help="directory to write; it must not exist")
    add_weights(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="dtype of the exported weights (default: %(default)s)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--merge", action="store_true", help="merge the adapters of model edits into the weights")
    how.add_argument("--adapter-only", metavar="EDIT", help="export only the adapter of this model edit")
    parser.add_argument(
        "--shard-gb",
        type=_parse_size,
        default=MAX_SHARD_BYTES / 1e9,
        help="maximum size of a weights file in GB (default: %(default)g)",
    )


def _parse_size(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, not {text}")
    return value


def write_model(
    options: argparse.Namespace,
    run: Run,
    where: str,
    arrays: Mapping[str, tuple[int, ...]],
    read: Read,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Write the model of a checkpoint as a Hugging Face directory; return the number of parameters written.

    where   source of the weights, for messages
    arrays  name -> shape of every array in the checkpoint
    read    function from names and shapes of arrays to the unsharded arrays
    check   called after the last read; if it raises, the directory is not created
    Raises UserError if no Hugging Face architecture is known for the model, or if wrapping edits are neither merged nor
    exported.
    """
    from gangline.model.compose import compose_model
    from gangline_models.hugging_face.adapters import decode_kept, find_frozen_bits, merge_edits, write_apart

    _, plan = compose_model(run)
    model_shapes = {parse_parameter(name): shape for name, shape in arrays.items() if is_of_model(name)}
    read = decode_kept(_map_reader(read, find_weights_under(options.weights, arrays, model_shapes)), model_shapes, plan)
    wrapping = {group: edit.resolve(run) for group, edit in sorted(run.edits.items()) if edit.wraps}
    if (group := options.adapter_only) is not None:
        adapter = wrapping[group].extract_adapter(model_shapes, plan) if group in wrapping else None
        if adapter is None:
            raise UserError(
                f"{group} of {where} cannot be exported as an adapter.",
                f"Model edits of this run with adapters: {', '.join(wrapping) or 'none'}.",
            )
        check()
        base = run.model.get_weights_directory()
        write_apart(options.out, adapter, read, model_shapes, options.dtype, base)
        if (bits := find_frozen_bits(model_shapes, plan, base)) is not None:
            text = f"the weights of {base}" if base else "its initial weights"
            note = (
                f"{group} of {where} was trained on {text} rounded to {bits} bits, and its outputs differ on the "
                "unrounded weights. --merge instead of --adapter-only exports the model as it was trained."
            )
            print(f"gangline export: note: {note}", file=sys.stderr, flush=True)
        return len(adapter.names)
    if wrapping and not options.merge:
        raise UserError(
            f"{where} has adapters that are not merged into its weights: {', '.join(wrapping)}.",
            "Hugging Face model files cannot store adapters.",
            f"--merge merges the adapters; --adapter-only {next(iter(wrapping))} exports one adapter alone.",
        )
    read = merge_edits(read, model_shapes, wrapping)
    config = make_run_config_json(run, where, options.dtype)
    shapes = {name: shape for name, shape in model_shapes.items() if find_hf_tensors(plan, name, shape)}
    most = int(options.shard_gb * 1e9)
    export(
        options.out,
        _check_after(read(shapes), check),
        plan=plan,
        shapes=shapes,
        config=config,
        dtype=options.dtype,
        max_shard_bytes=most,
        beside=_collect_files(run),
    )
    return len(shapes)


def _check_after(
    arrays: Iterator[tuple[str, torch.Tensor]], check: Callable[[], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the arrays, then call `check`."""
    yield from arrays
    check()


def _collect_files(run: Run) -> dict[str, bytes]:
    """Collect files to write next to the weights (tokenizer); if they are missing, print a note and return {}."""
    try:
        return run.data.export_files(run)
    except UserError as error:
        missing = " ".join((error.what, *error.details))
        print(f"gangline export: note: the export has no tokenizer: {missing}", file=sys.stderr, flush=True)
        return {}


def _map_reader(read: Read, held: Mapping[str, str]) -> Read:
    """Wrap `read`, which takes names of arrays, to take names of parameters. held: parameter -> name of its array."""

    def read_by_parameter(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = {held[name]: name for name in shapes}
        for array, whole in read({held[name]: shape for name, shape in shapes.items()}):
            yield parameters[array], whole

    return read_by_parameter


def _choose(kept: Checkpointer, run_dir: str, wanted: str | None) -> CheckpointId:
    ids = kept.list()
    checkpoint_id = kept.find_latest() if wanted is None else CheckpointId.parse(wanted)
    if checkpoint_id is None or checkpoint_id not in ids:
        what = "checkpoint" if wanted is None else f"checkpoint {wanted}"
        raise UserError(f"{run_dir} has no {what}.", f"Checkpoints of the run: {', '.join(map(str, ids)) or 'none'}.")
    return checkpoint_id


def _compose_plan(run: Run) -> Plan:
    from gangline.model.compose import compose_model

    return compose_model(run)[1]


def _read_arrays(
    kept: Checkpointer, id: CheckpointId, plan: Plan, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, unsharded array) of a checkpoint, one after another."""
    import torch

    from gangline.mesh import Mesh
    from gangline.shard import Layout, Registry, Shard

    for name, shape in shapes.items():
        codes = plan.get_dtype(parse_parameter(name)) == "int8"
        whole = torch.empty(shape, dtype=torch.int8 if codes else torch.float32)
        shard = Shard(name, shape, whole.dtype, (0,) * len(shape), whole)
        kept.load(id, [shard], Registry.of(Mesh.of({}), {shard.name: Layout(shape)}))
        yield name, whole


def import_model(argv: Sequence[str]) -> int:
    """Run `gangline import DIR`: check a Hugging Face directory and print the `train` command that starts from it."""
    parser = argparse.ArgumentParser(
        prog="gangline import", description="Print the train command that starts from a Hugging Face directory."
    )
    parser.add_argument("directory", metavar="DIR", help="directory with config.json and safetensors files")
    options = parser.parse_args(list(argv))

    directory = Path(options.directory).expanduser().resolve()
    model, *settings = list_overrides(directory)
    print(format_train_command([model, *settings]))
    return 0


def _check_tensors(directory: Path, config: ModelConfig, edits: Sequence[EditConfig]) -> None:
    """Raise UserError if a run could not start from the directory: weights are missing or do not fit the model."""
    from gangline.config.check import find_part_problems
    from gangline.config.defaults import build_default_run
    from gangline.model.build import construct
    from gangline.model.compose import compose_model
    from gangline.model.init import list_shards
    from gangline.plugin.registry import installed
    from gangline_models.hugging_face.read import check_pretrained, refuse_larger

    run = build_default_run(model=config, **{installed().find_part(edit).group: edit for edit in edits})
    if problems := find_part_problems(run, [config, *edits]):
        raise UserError.of(problems)
    tree, plan = compose_model(run)
    refuse_larger(directory, tree)
    check_pretrained(directory, list_shards(construct(tree), plan), plan)  # on the meta device


def list_overrides(directory: Path) -> list[str]:
    """Return the unquoted overrides of `train` for the model in a Hugging Face directory, `model=...` first.

    Only the headers of the weights are read. Raises UserError if `train` would refuse the directory.
    """
    config, edits = read_edited_config(directory)
    _check_tensors(directory, config, edits)
    return [*(word for part in (config, *edits) for word in _list_part_overrides(part)), *_find_tokenizer(directory)]


def _list_part_overrides(config: PartConfig) -> list[str]:
    """Return the overrides that select a part, its inner parts, and their options that differ from the defaults."""
    from gangline.plugin.registry import installed

    offer = installed().find_part(config)
    words = [f"{offer.group}={offer.part.name}", *_list_settings(config, offer.group, set(offer.part.opens))]
    for name in offer.part.opens:
        inner = getattr(config, name)
        words.append(f"{offer.group}/{name}={installed().find_part(inner).part.name}")
        words += _list_settings(inner, f"{offer.group}.{name}")
    return words


def _list_settings(config: PartConfig, place: str, opens: Collection[str] = ()) -> list[str]:
    """Return the overrides of the options that differ from the part's defaults."""
    defaults = type(config)()
    settings = [
        (item.name, value)
        for item in fields(config)
        if item.name not in opens and (value := getattr(config, item.name)) != getattr(defaults, item.name)
    ]
    return [override(f"{place}.{name}", to_plain(value)) for name, value in settings]


def format_train_command(overrides: Sequence[str]) -> str:
    """Format the `train` command for a shell, one override per line."""
    return " \\\n  ".join(["train " + shlex.quote(overrides[0]), *map(shlex.quote, overrides[1:])])


def _find_tokenizer(directory: Path) -> list[str]:
    path = directory / "tokenizer.json"
    return [override("data.tokenizer", str(path))] if path.is_file() else []
