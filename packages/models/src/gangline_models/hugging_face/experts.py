"""Refusal of config.json fields that describe experts or packed weights. Torch-free.

gangline-moe reads config.json first. It passes the config.json of the model without experts to the family's converter.
"""

from __future__ import annotations

from gangline import UserError
from gangline_models.hugging_face.config_reader import ConfigReader


def refuse_experts(reader: ConfigReader, name: str, absent: int) -> None:
    """Raise UserError if the field `name`, the number of experts, is not 0. absent: its value in a file without it."""
    if experts := reader.take(name, absent):
        raise UserError(
            f"{reader.directory} holds a model with {name}={experts}, and gangline-models does not support experts.",
            "gangline-moe adds experts by a model edit:  pip install gangline-moe",
            f"gangline import {reader.directory} then prints the options of model and experts.",
        )


def refuse_packed(reader: ConfigReader, name: str) -> None:
    """Raise UserError if the field `name` is set: the weights are then quantised."""
    if packed := reader.take(name):
        raise UserError(
            f"{reader.directory} holds quantised weights: {name}={packed}.",
            "gangline reads weights only in floating-point dtypes of 16 bits or more.",
            "Dequantise and save the model with transformers (dequantize=True in its quantization_config).",
        )
