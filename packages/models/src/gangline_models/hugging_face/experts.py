"""Refusal of config.json fields that describe experts or packed weights. Torch-free.

gangline-moe reads a config.json before a family does, and passes on the config.json of the model without experts.
"""

from __future__ import annotations

from gangline import UserError
from gangline_models.hugging_face.config_reader import ConfigReader


def refuse_experts(reader: ConfigReader, name: str, absent: int) -> None:
    """Raise UserError if the field `name` of the config.json says that the model has experts."""
    if experts := reader.take(name, absent):
        raise UserError(
            f"{reader.directory} holds a model with {name}={experts}, which this model does not have.",
            "Experts are a model edit, supplied by gangline-moe:  pip install gangline-moe",
            f"gangline import {reader.directory} then prints the settings of both.",
        )


def refuse_packed(reader: ConfigReader, name: str) -> None:
    """Raise UserError if the field `name` says that weights are quantised."""
    if packed := reader.take(name):
        raise UserError(
            f"{reader.directory} holds weights with {name}={packed}.",
            "gangline reads weights as numbers of 16 bits and more.",
            "transformers unpacks them (dequantize=True of its quantization_config) and saves them.",
        )
