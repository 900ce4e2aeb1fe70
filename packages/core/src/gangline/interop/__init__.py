"""Weights to and from Hugging Face: a directory with config.json and safetensors, named by the plan.

Importing this imports no torch; reading and writing do.
"""

from gangline.interop.config import config_json, model_config_from
from gangline.interop.read import load_pretrained
from gangline.interop.write import export

__all__ = ["config_json", "export", "load_pretrained", "model_config_from"]
