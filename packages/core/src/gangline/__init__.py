"""gangline: a composable platform for training large language models. Torch-free at import."""

from gangline.errors import BadCheckpoint, Problem, UserError
from gangline.plugin.hooks import Command, Kind, hookimpl
from gangline.plugin.parts import Part

__all__ = ["BadCheckpoint", "Command", "Kind", "Part", "Problem", "UserError", "hookimpl"]
