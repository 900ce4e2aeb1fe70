"""Options that all families have: sizes, windows and rotary positions. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from gangline import Problem
from gangline.config import ModelConfig, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, list_divisors
from gangline_basics.model.rope_rates import Rope
from gangline_models.rope.base import PlainRope, RopeChoice

if TYPE_CHECKING:
    from gangline.config import Run


@dataclass
class FamilyConfig(ModelConfig):
    """A decoder as a family has it."""

    file_options: ClassVar[tuple[str, ...]] = ("weights",)

    dim: PositiveInt = 768  # width of the residual stream
    layers: PositiveInt = 12  # blocks of attention and feed-forward
    heads: PositiveInt = 12  # of attention: queries
    hidden: PositiveInt = 2048  # width of the feed-forward
    tied: bool = False  # the head multiplies with the embedding's weight
    norm_eps: NonNegativeFloat = 1e-6  # added to the mean square, or the variance, in every norm
    z_loss: NonNegativeFloat = 0.0  # weight of log²Z of the logits: joins the gradients, not the loss (PaLM: 1e-4)
    init_std: NonNegativeFloat = 0.02  # of every matrix; those that write to the residual stream: / sqrt(2 · layers)
    weights: str | None = None  # a Hugging Face directory to start from instead of drawn weights

    def get_weights_directory(self) -> str | None:
        return self.weights

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return self.heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.dim // self.heads

    def get_window(self, block: int) -> int | None:
        """The window of that block, or None."""
        return None

    @property
    def windows(self) -> list[int | None]:
        """Of each block."""
        return [self.get_window(block) for block in range(self.layers)]

    def get_rope(self, block: int, length: int) -> Rope | None:
        """The rotary positions of that block, in rows of `length` tokens; None: it has none."""
        return None

    def check(self, run: Run) -> list[Problem]:
        if self.dim % self.heads == 0 or self.head_width != self.dim // self.heads:
            return []
        what = f"model.dim={self.dim} does not divide into model.heads={self.heads}"
        mend = f"Choose model.heads among {list_divisors(self.dim)}."
        return [Problem(what, "Where nothing else is said a head is dim / heads wide.", mend)]


@dataclass
class RotaryConfig(FamilyConfig):
    """With rotary positions, and key heads that may be fewer."""

    kv_heads: PositiveInt | None = None  # key and value heads, each for heads / kv_heads query heads; null: heads
    head_dim: PositiveInt | None = None  # width of a head; null: dim / heads
    rope_theta: PositiveFloat = 10_000.0  # base of the wavelengths of rotary positions
    rope: RopeChoice = field(default_factory=PlainRope)

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def rotated(self) -> int:
        """How many features of a head are rotated."""
        return self.head_width

    def get_rope(self, block: int, length: int) -> Rope | None:
        from gangline.plugin.registry import build

        return Rope(self.rope_theta, build(self.rope, length), self.rotated)

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        if not problems and self.rotated % 2:
            what = f"of each head {self.rotated} features are rotated"
            problems.append(Problem(what, "Rotary positions turn features in pairs.", "Take an even model.head_dim."))
        if self.heads % self.key_heads:
            problems.append(
                Problem(
                    f"model.kv_heads={self.key_heads} does not divide model.heads={self.heads}",
                    "Each key head serves the same number of query heads.",
                    f"Choose model.kv_heads among {list_divisors(self.heads)}.",
                )
            )
        return problems


@dataclass
class WindowedConfig(RotaryConfig):
    """All blocks may see a window."""

    window: PositiveInt | None = None  # tokens that a query sees, itself among them; null: all before it

    def get_window(self, block: int) -> int | None:
        return self.window


@dataclass
class PatternConfig(WindowedConfig):
    """Some blocks see a window, others all."""

    full_first: NonNegativeInt = 0  # with a window: so many blocks before the first that has it
    full_every: PositiveInt | None = None  # with a window: of so many blocks the last one sees all; null: none does

    def get_window(self, block: int) -> int | None:
        full = block < self.full_first or (self.full_every and (block + 1) % self.full_every == 0)
        return None if full else self.window


@dataclass
class TwoRopesConfig(PatternConfig):
    """Blocks with a window have rotary positions of their own base, and only the others' are scaled."""

    local_rope_theta: PositiveFloat = 10_000.0  # base of the wavelengths in blocks with a window

    def get_rope(self, block: int, length: int) -> Rope | None:
        return Rope(self.local_rope_theta) if self.get_window(block) else super().get_rope(block, length)
