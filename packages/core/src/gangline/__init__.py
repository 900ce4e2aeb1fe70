"""gangline: a composable platform for training large language models. Torch-free at import."""

from gangline.errors import BadCheckpoint, Problem, UserError
from gangline.hooks import Command, Kind, hookimpl
from gangline.parts import Part

__all__ = ["BadCheckpoint", "Command", "Kind", "Part", "Problem", "UserError", "hookimpl"]
