"""Check before the start of a run that a peft adapter fits the run's model. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline import Problem, UserError
from gangline.model.compose import compose_model
from gangline.model.tree import Shape, get_parameter_shapes
from gangline.plan import Plan
from gangline_finetune.lora.peft import CONFIG, DEFAULTS, SAME, check_files, map_names, read_config

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_finetune.lora.config import LoraConfig


def compose_names_and_shapes(run: Run) -> tuple[dict[str, str], dict[str, Shape], Plan]:
    """Return (adapter parameter -> peft's name, shapes of all parameters of the model, the plan)."""
    tree, plan = compose_model(run)
    shapes = get_parameter_shapes(tree)
    return map_names(shapes, plan), shapes, plan


def find_adapter_problems(options: LoraConfig, run: Run) -> list[Problem]:
    """Return problems that prevent the run from starting with `options.adapter`."""
    directory = str(options.adapter)
    try:
        adapter_config = read_config(directory)
        adapter_options = {option: adapter_config.get(name, DEFAULTS[name]) for option, name in SAME.items()}
        other = {option: value for option, value in adapter_options.items() if value != getattr(options, option)}
        if other:
            has = ", ".join(f"{SAME[name]}={value}" for name, value in other.items())
            fix = " ".join(f"lora.{name}={str(value).lower()}" for name, value in other.items())
            return [
                Problem(f"lora.adapter={directory} has {has}, unlike the run.", f"The values are in {CONFIG}.", fix)
            ]
        if options.dora and run.model.get_weights_directory() is None:
            why = "DoRA magnitudes depend on the base weights, and without model.weights the weights are random."
            return [Problem(f"lora.adapter={directory} needs its base weights.", why, "model.weights=DIR")]
        names, shapes, _ = compose_names_and_shapes(run)
        check_files(directory, names, shapes)
    except UserError as error:
        return [error.to_problem()]
    return []
