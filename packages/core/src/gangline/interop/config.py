"""Between a Hugging Face config.json and a model's configuration. Torch-free."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gangline.config.fields import stated
from gangline.config.schema import EditConfig, ModelConfig, Run
from gangline.config.suggest import near
from gangline.errors import Problem, UserError
from gangline.files import read_regular
from gangline.interop.fields import checked, refuse_unknown
from gangline.interop.rope import ROPE_FIELDS, SCALING, read_rope
from gangline.interop.tensors import tensor_names
from gangline.interop.window import WINDOW_FIELDS, read_window, window_json
from gangline.model.config import DecoderConfig
from gangline.plugin.catalogue import suppliers
from gangline.run.directory import holds_checkpoint

# -> whether queries and keys are normalised
ARCHITECTURES = {"LlamaForCausalLM": False, "MistralForCausalLM": False, "Qwen3ForCausalLM": True}
MODEL_TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen3ForCausalLM": "qwen3"}

# ours -> theirs, where the value is the same
SAME = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden": "intermediate_size",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # OWNER/MODEL
NEEDED = ("vocab_size", "dim", "layers", "heads", "kv_heads", "hidden")
# What this architecture does not have: theirs -> the only value that means it is absent.
ABSENT = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
# All that is looked at. What is beside it and not harmless is refused by its name.
KNOWN = frozenset((*SAME.values(), *ABSENT, *ROPE_FIELDS, *WINDOW_FIELDS))

# What the values of some fields look like; others are checked where they are read.
SHAPES = {
    "architectures": list[str] | None,
    "layer_types": list[str] | None,
    "rope_parameters": dict | None,
    "rope_scaling": dict | None,
}
COUNTS = ("num_hidden_layers", "n_layer", "num_nextn_predict_layers", "num_mtp_layers")
FEW = 1000  # layers: a list of so many costs nothing, and weights are not looked at


def read_config(directory: str | Path) -> dict[str, Any]:
    """The config.json of a directory. Raises UserError where there is none or it is not JSON."""
    path = Path(directory).expanduser() / "config.json"
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        if _HUB.fullmatch(str(directory)) and not Path(directory).exists():
            own = str(directory).partition("/")[2]
            raise UserError(
                f"there is no directory {directory}, and nothing is downloaded here.",
                f"If it is a model of the hub:  hf download {directory} --local-dir {own}",
                f"Then  gangline import {shlex.quote(str(own))}  prints the command that trains on from it.",
            ) from None
        raise UserError(
            f"{directory} is not a Hugging Face model directory.",
            "It has no config.json.",
            "hf download OWNER/MODEL --local-dir DIR makes one.",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read.", str(error)) from error
    except RecursionError:
        raise UserError(f"{path} cannot be read.", "It is nested too deeply.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read.", "It is not a JSON object.")
    for name, hint in SHAPES.items():
        checked(name, content.get(name), hint, f"{directory} holds a model")
    _refuse_counts(directory, content)
    return content


def _refuse_counts(directory: str | Path, content: dict[str, Any]) -> None:
    """Raises UserError for more layers than the weights have tensors: before a list of so many is made."""
    for name in COUNTS:
        count = content.get(name)
        if isinstance(count, int) and count > FEW and count > (held := len(tensor_names(directory))):
            raise UserError(
                f"{directory} holds a model with {name}={count}.",
                f"Its weights have {held} tensors, and each layer has tensors of its own.",
            )


def model_config_from(directory: str | Path) -> ModelConfig:
    """The configuration of the plain model in a Hugging Face directory, to start from its weights.

    It is of the installed part that names the architecture. Raises UserError where none does, and for what the part
    cannot compute.
    """
    return _model(directory, read_config(directory))


def edited_config_from(
    directory: str | Path, edits: Iterable[type[EditConfig]] | None = None
) -> tuple[ModelConfig, list[EditConfig]]:
    """The same of a model that takes model edits, and these: of the classes `edits`, or of all that are installed."""
    theirs, found = read_config(directory), []
    for cls in _edits() if edits is None else edits:
        if (told := cls.of_hugging_face(theirs)) is not None:
            found += [told[0]] * told[0].in_files(str(directory))
            theirs = told[1]
    return _model(directory, theirs), found


def _model(directory: str | Path, theirs: dict[str, Any]) -> ModelConfig:
    architecture = (theirs.get("architectures") or [None])[0]
    known = readers()
    if architecture not in known:
        raise UserError(
            f"{directory} holds a model of architecture {architecture}.",
            f"{near(str(architecture), list(known))} Known here: {', '.join(known)}.".strip(),
            f"More come with {', '.join(suppliers('model'))}, where that is not installed.",
        )
    return known[architecture].of_hugging_face(directory, theirs)


def readers() -> dict[str, type[ModelConfig]]:
    """Architecture -> the class of the installed part of group `model` that names it."""
    from gangline.plugin.registry import installed

    configs = [offer.part.config for _, offer in sorted(installed().offers("model").items())]
    return {name: config for config in configs for name in vars(config).get("architectures", ())}


def _edits() -> list[type[EditConfig]]:
    """The installed edits that know of architectures themselves."""
    from gangline.plugin.registry import installed

    groups = sorted(installed().edit_groups())
    configs = [offer.part.config for group in groups for offer in installed().offers(group).values()]
    return [config for config in configs if "of_hugging_face" in vars(config)]


def decoder_of(directory: str | Path, theirs: dict[str, Any]) -> DecoderConfig:
    """The part `decoder` of a config.json that has one of `ARCHITECTURES`.

    Reads what transformers 4 writes (rope_theta, rope_scaling) and what 5 does (rope_parameters). Raises UserError for
    what it cannot compute.
    """
    architecture, holder, ranges = theirs["architectures"][0], f"{directory} holds a model", stated(DecoderConfig)
    for key, value in ABSENT.items():
        if theirs.get(key, value) != value:
            raise UserError(
                f"{directory} holds a model with {key}={theirs[key]}.", f"gangline's decoder has only {key}={value}."
            )
    ours = {
        mine: checked(key, theirs[key], ranges[mine], holder)
        for mine, key in SAME.items()
        if theirs.get(key) is not None
    }
    missing = [SAME[name] for name in NEEDED if name not in ours]
    if missing:
        raise UserError(f"{directory}/config.json does not give {', '.join(missing)}.")
    ours.setdefault("norm_eps", 1e-6)  # what transformers takes where a file is silent
    refuse_unknown(directory, theirs, KNOWN)
    if ARCHITECTURES[architecture]:
        ours.setdefault("head_dim", 128)  # of Qwen3; a head of the others is hidden_size / heads wide
    return DecoderConfig(
        **ours,
        **read_rope(directory, theirs, ranges),
        **read_window(directory, theirs, ours["layers"]),
        qk_norm=ARCHITECTURES[architecture],
        weights=str(directory),
    )


def architecture_of(config: DecoderConfig) -> str:
    """Who of theirs computes what this model does. Raises UserError where nobody does."""
    other = {"attention_scale": config.attention_scale, "soft_cap": config.soft_cap, "sinks": config.sinks or None}
    if left := [f"model.{name}" for name, value in other.items() if value is not None]:
        raise UserError(
            f"a model with {', '.join(left)} has no Hugging Face architecture.",
            f"{', '.join(ARCHITECTURES)} would leave it out and compute something else.",
        )
    if config.qk_norm:
        return "Qwen3ForCausalLM"
    return "LlamaForCausalLM" if config.window is None else "MistralForCausalLM"


def config_json(config: DecoderConfig, *, dtype: str = "float32", max_position: int = 2048) -> dict[str, Any]:
    """What transformers needs to open the model, in the words that both 4 and 5 read.

    max_position: the context it was trained with; with rotary scaling it follows from the scaling. Raises UserError for
    what no architecture of theirs computes. The z-term of the loss is of training alone.
    """
    architecture = architecture_of(config)
    values = {theirs: getattr(config, mine) for mine, theirs in SAME.items()}
    scaling = None
    if config.rope_scaling_factor is not None:
        scaling = {"rope_type": "llama3", **{theirs: getattr(config, mine) for mine, theirs in SCALING.items()}}
        max_position = round(config.rope_original_max_position * config.rope_scaling_factor)
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        **values,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_width,
        **ABSENT,
        **window_json(config, architecture),
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": max_position,
        "torch_dtype": dtype,
    }


def check_weights(run: Run) -> list[Problem]:
    """Whether the directory that `model.weights` names, if it names one, holds this very model.

    What belongs to the edits they compare themselves, in `EditConfig.check`. A run that goes on takes its weights from
    its checkpoint and needs the directory no more.
    """
    config, directory = run.model, run.model.pretrained()
    if directory is None or not config.architectures or holds_checkpoint(run):
        return []
    try:
        stored, _ = edited_config_from(directory, [type(options) for options in run.edits.values()])
    except UserError as error:
        return [Problem(f"model.weights: {error.what}", *error.details[:2])]
    mend = f"gangline import {shlex.quote(str(directory))} prints the configuration that fits it."
    there, here = stored.computed(), config.computed()
    if not isinstance(config, type(stored)):
        other = [f"it is a {', '.join(stored.architectures[:1])}, which {type(config).__name__} does not compute"]
    else:
        other = [f"{n} is {there.get(n)} there and {v} here" for n, v in here.items() if v != there.get(n)]
    if not other:
        return []
    return [Problem(f"model.weights={directory} holds another model.", "; ".join(other) + ".", mend)]
