"""Conversion between a Hugging Face config.json and a model's configuration. Torch-free."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gangline.config.schema import EditConfig, ModelConfig, Run
from gangline.errors import Problem, UserError
from gangline.run.directory import holds_checkpoint
from gangline.storage.files import read_regular
from gangline_models.hugging_face.contract import (
    find_model_format,
    get_edit_format,
    get_model_format,
    list_edit_classes,
)
from gangline_models.hugging_face.fields import check_value
from gangline_models.hugging_face.tensors import list_tensor_names

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # OWNER/MODEL
# Field -> type, checked at loading. Other fields are checked when they are read.
SHAPES = {
    "architectures": list[str] | None,
    "layer_types": list[str] | None,
    "rope_parameters": dict | None,
    "rope_scaling": dict | None,
}
COUNTS = ("num_hidden_layers", "n_layer", "num_nextn_predict_layers", "num_mtp_layers")
FEW = 1000  # maximum number of layers accepted without checking it against the number of tensors


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read the config.json of a directory. Raises UserError if it is missing or not a JSON object."""
    path = Path(directory).expanduser() / "config.json"
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        if _HUB.fullmatch(str(directory)) and not Path(directory).exists():
            own = str(directory).partition("/")[2]
            raise UserError(
                f"the directory {directory} does not exist, and gangline downloads no models.",
                f"To download a model of the Hugging Face hub:  hf download {directory} --local-dir {own}",
                f"Then  gangline import {shlex.quote(str(own))}  prints the train command.",
            ) from None
        raise UserError(
            f"{directory} is not a Hugging Face model directory.",
            "The directory lacks config.json.",
            "hf download OWNER/MODEL --local-dir DIR  downloads such a directory.",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read.", str(error)) from error
    except RecursionError:
        raise UserError(f"{path} cannot be read.", "The JSON is nested too deeply.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read.", "The content must be a JSON object.")
    for name, hint in SHAPES.items():
        check_value(name, content.get(name), hint, f"{directory} holds a model")
    _refuse_counts(directory, content)
    return content


def _refuse_counts(directory: str | Path, content: dict[str, Any]) -> None:
    """Raise UserError if config.json gives more layers than there are tensors, before lists of that length are made."""
    for name in COUNTS:
        count = content.get(name)
        if isinstance(count, int) and count > FEW and count > (tensor_count := len(list_tensor_names(directory))):
            raise UserError(
                f"{directory} holds a model with too large {name}={count}.",
                f"The weights have {tensor_count} tensors, fewer than one per layer.",
            )


def read_model_config(directory: str | Path) -> ModelConfig:
    """Return the options of the model in a Hugging Face directory, without edits, with `weights` set to the directory.

    The model's part is the installed part that supports the architecture. Raises UserError if there is none, and for
    unsupported features.
    """
    return _read_model(directory, read_config(directory))


def read_edited_config(
    directory: str | Path, edits: Iterable[type[EditConfig]] | None = None
) -> tuple[ModelConfig, list[EditConfig]]:
    """Return (options of the model without edits, options of the edits found in config.json).

    edits: option classes of edits to look for; None: classes of all installed edits.
    """
    hf_config, edit_options = read_config(directory), []
    for cls in list_edit_classes() if edits is None else edits:
        if (format := get_edit_format(cls)) is not None and (read := format.read(cls, hf_config)) is not None:
            options, hf_config = read
            edit_options += [options] * format.has_weights(options, directory)
    return _read_model(directory, hf_config), edit_options


def _read_model(directory: str | Path, hf_config: dict[str, Any]) -> ModelConfig:
    architecture = (hf_config.get("architectures") or [None])[0]
    return find_model_format(str(architecture), directory).read(directory, hf_config)


def make_run_config_json(run: Run, where: str, dtype: str) -> dict[str, Any]:
    """Return the config.json of the run's model with its edits. Raises UserError if no architecture describes it.

    where: source of the weights, for the message. dtype: dtype of the weights.
    """
    what, format = type(run.model).__name__, get_model_format(run.model)
    config = None if format is None else format.write(run.model, dtype, run.batch.sequence_length)
    for group, options in sorted(run.edits.items()):
        if config is not None and not options.wraps:
            edit, what = get_edit_format(type(options)), group
            config = None if edit is None else edit.write(options, config)
    if config is None:
        raise UserError(
            f"{where} cannot be exported: no Hugging Face architecture is known for it.",
            f"{what} has no conversion to config.json (capability hugging_face).",
        )
    return config


def check_weights(run: Run) -> list[Problem]:
    """Return a problem if the directory in `model.weights` holds another model than the run's.

    Edits compare their options in `EditConfig.check`. A resumed run loads its checkpoint instead, and does not
    need the directory.
    """
    config, directory = run.model, run.model.get_weights_directory()
    if directory is None or (here := get_model_format(config)) is None or holds_checkpoint(run):
        return []
    try:
        stored_config, _ = read_edited_config(directory, [type(options) for options in run.edits.values()])
    except UserError as error:
        return [Problem(f"model.weights: {error.what}", *error.details[:2])]
    fix = f"gangline import {shlex.quote(str(directory))} prints the options that fit the directory."
    there = get_model_format(stored_config)
    assert there is not None, "the part that read it"
    if not isinstance(config, type(stored_config)):
        other = [
            f"the directory has a {', '.join(there.architectures[:1])}, which {type(config).__name__} does not support"
        ]
    else:
        description = there.describe(stored_config)
        other = [
            f"{n} is {description.get(n)} in the directory and {v} in the run"
            for n, v in here.describe(config).items()
            if v != description.get(n)
        ]
    if not other:
        return []
    return [Problem(f"model.weights={directory} does not match the model of the run.", "; ".join(other) + ".", fix)]
