"""Parts of the group `model/rope` (RoPE scaling). Torch-free."""

from __future__ import annotations

from gangline import Part
from gangline_models.rope.base import GROUP, PlainRope, RopeChoice
from gangline_models.rope.dynamic import DynamicRope
from gangline_models.rope.linear import LinearRope
from gangline_models.rope.llama3 import Llama3Rope
from gangline_models.rope.longrope import LongRope
from gangline_models.rope.yarn import YarnRope

CHOICES: dict[str, tuple[type[RopeChoice], str]] = {
    "plain": (PlainRope, "RoPE with base model.rope_theta, without scaling"),
    "linear": (LinearRope, "all wavelengths grow by one factor (position interpolation)"),
    "dynamic": (DynamicRope, "the base grows with the row length (NTK-aware)"),
    "yarn": (YarnRope, "long wavelengths grow, short ones are unscaled, attention scores are scaled up"),
    "longrope": (LongRope, "each wavelength grows by its own factor"),
    "llama3": (Llama3Rope, "long wavelengths grow, short ones are unscaled, as in Llama 3.1"),
}
BY_KIND = {config.kind: config for config, _ in CHOICES.values()}


def find_name(rope: RopeChoice) -> str:
    """Return the name of the part with these options."""
    return next(name for name, (config, _) in CHOICES.items() if config is type(rope))


PARTS = tuple(
    Part(name=name, group=GROUP, config=config, build="gangline_models.rope.base:build", summary=summary)
    for name, (config, summary) in CHOICES.items()
)
