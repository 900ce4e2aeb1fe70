"""Adapters in peft's format: adapter_config.json, and adapter_model.safetensors with peft's names. Torch-free.

    gangline  blocks.0.attention.wq.lora_a.weight
    peft      base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

DoRA's magnitudes are stored here as differences from the base weight's row norms, and by peft as absolute norms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline import UserError
from gangline.model.tree import Shape
from gangline.plan import Plan
from gangline_models.hugging_face.names import find_hf_tensors
from gangline_models.hugging_face.tensor_file import TensorFile

if TYPE_CHECKING:
    from gangline_finetune.lora.config import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PARTS = {
    "lora_a.weight": "lora_A.weight",
    "lora_b.weight": "lora_B.weight",
    "lora_lengths.weight": "lora_magnitude_vector",
}
SAME = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}  # option -> key of peft
DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False}  # peft's defaults
# Keys of adapter_config.json that are ignored: training-only, for other software, or implied by the tensors.
IDLE = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
# Key -> values that do not change the output. Other initialisations (pissa, olora, corda, loftq, future ones) may have
# changed the base weights too: the adapter then belongs to a base other than base_model_name_or_path.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
EMPTY: tuple[Any, ...] = (None, False, [], {})  # values that switch off any other key


def find_unknown_key(config: Mapping[str, Any]) -> str | None:
    """Return the first key of adapter_config.json whose value is not supported and may change the output, or None."""
    for name, value in config.items():
        if name in SAME.values() or name in IDLE:
            continue
        if value not in PLAIN.get(name, EMPTY):
            return name
    return None


def find_module(plan: Plan, path: str, shape: Shape) -> str:
    """Return the Hugging Face module of the linear at `path`, whose weight has this shape.

    Raises UserError unless the parameter is exactly one Hugging Face matrix, since peft adapts Hugging Face matrices.
    """
    matrices = find_hf_tensors(plan, f"{path}.weight", shape)
    if len(matrices) != 1 or matrices[0].index is not None or matrices[0].first is not None:
        cut = (
            "Hugging Face files split this weight, or join it with other weights: "
            f"{', '.join(one.name for one in matrices[:2])}."
        )
        raise UserError(
            f"peft does not support the adapter of {path}.",
            cut if matrices else "Hugging Face files of this model have no such matrix.",
            "gangline export --merge  exports the weights with the adapter merged.",
        )
    return matrices[0].name.removesuffix(".weight")


def split_unsupported_linears(shapes: Mapping[str, Shape], plan: Plan) -> tuple[list[str], list[str]]:
    """Return last names of adapted linears: (names with an adapter that peft does not support, supported names).

    peft does not support linears that Hugging Face files join or split. Linears that the files lack are omitted.
    """
    other, same = dict[str, None](), dict[str, None]()
    for part in shapes:
        path = part.removesuffix(".lora_a.weight")
        if path == part or not find_hf_tensors(plan, f"{path}.weight", shapes[f"{path}.weight"]):
            continue
        try:
            find_module(plan, path, shapes[f"{path}.weight"])
            same[path.rpartition(".")[2]] = None
        except UserError:
            other[path.rpartition(".")[2]] = None
    return list(other), [name for name in same if name not in other]


def map_names(shapes: Mapping[str, Shape], plan: Plan) -> dict[str, str]:
    """Return adapter parameter -> tensor name in peft's file."""
    names = {}
    for name in shapes:
        for part, peft_part in PARTS.items():
            if name.endswith(f".{part}"):
                path = name.removesuffix(f".{part}")
                names[name] = f"base_model.model.{find_module(plan, path, shapes[f'{path}.weight'])}.{peft_part}"
    return names


def make_adapter_config(options: LoraConfig, shapes: Mapping[str, Shape], plan: Plan) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    wrapped = [name.removesuffix(".lora_a.weight") for name in shapes if name.endswith(".lora_a.weight")]
    modules = [find_module(plan, path, shapes[f"{path}.weight"]) for path in wrapped]
    transposed = any(find_hf_tensors(plan, f"{path}.weight", shapes[f"{path}.weight"])[0].transpose for path in wrapped)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **{key: getattr(options, option) for option, key in SAME.items()},
        "lora_dropout": options.dropout,
        "target_modules": _shorten_names(modules, _list_unwrapped(shapes, plan, wrapped)),
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "base_model_name_or_path": None,
    }


def _list_unwrapped(shapes: Mapping[str, Shape], plan: Plan, wrapped: list[str]) -> set[str]:
    """Return the last names of Hugging Face modules without an adapter."""
    paths = {
        name.removesuffix(".weight") for name, shape in shapes.items() if name.endswith(".weight") and len(shape) > 1
    }
    paths -= {path for path in paths if ".lora_" in path} | set(wrapped)
    hf_tensors = [
        hf_tensor for path in paths for hf_tensor in find_hf_tensors(plan, f"{path}.weight", shapes[f"{path}.weight"])
    ]
    return {hf_tensor.name.removesuffix(".weight").rpartition(".")[2] for hf_tensor in hf_tensors}


def _shorten_names(modules: list[str], others: set[str]) -> list[str]:
    """Return the modules' last names if no module in `others` has the same, else full names; peft accepts both."""
    last = {module.rpartition(".")[2] for module in modules}
    return sorted(modules if last & others else last)


def read_config(directory: str) -> dict[str, Any]:
    """Read adapter_config.json. Raises UserError if it is missing, damaged, or describes an unsupported adapter."""
    path = Path(directory).expanduser() / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"lora.adapter={directory} is not a peft adapter.", f"The directory lacks {CONFIG}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read.", str(error)) from error
    if not isinstance(config, dict):
        raise UserError(f"{path} cannot be read.", "The content must be a JSON object.")
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{path} describes an adapter of type {config.get('peft_type')}.", "lora=on supports only LORA."
        )
    if name := find_unknown_key(config):
        raise UserError(
            f"{path} has the unsupported setting {name}={config[name]!r:.60}.",
            "The setting may change the outputs or the base weights, and lora=on does not implement it.",
            "Merge the adapter into its base with peft (merge_and_unload), and set model.weights to the result.",
        )
    return config


def read_shapes(directory: str) -> dict[str, Shape]:
    """Return name -> shape of an adapter's tensors. Raises UserError if the file cannot be read."""
    path = Path(directory).expanduser() / WEIGHTS
    try:
        with TensorFile(path) as file:
            return {name: file.get_shape(name) for name in file.list_names()}
    except OSError as error:
        raise UserError(f"{path} cannot be read.", getattr(error, "strerror", None) or str(error)) from error


def check_files(directory: str, names: Mapping[str, str], shapes: Mapping[str, Shape]) -> None:
    """Raise UserError, naming the tensor and the shapes, unless the files hold exactly the tensors in `names`."""
    there = read_shapes(directory)
    what = f"lora.adapter={directory} does not fit: its base model or its targets differ from the run's."
    for name, peft_name in names.items():
        if peft_name not in there:
            raise UserError(what, f"The tensor {peft_name} for {name} is missing.")
        if there[peft_name] != shapes[name]:
            raise UserError(
                what, f"{peft_name} has shape {there[peft_name]}; for {name} the shape must be {shapes[name]}."
            )
    if beyond := sorted(set(there) - set(names.values())):
        raise UserError(what, f"{beyond[0]} and {len(beyond) - 1} more tensors match no parameter of this model.")
