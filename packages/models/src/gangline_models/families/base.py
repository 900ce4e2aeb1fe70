"""Base options of all model families: sizes, windows and rotary positions. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from gangline import Problem
from gangline.config import ModelConfig, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, list_divisors
from gangline_basics.model.attention_backend import AttentionBackend, find_missing
from gangline_basics.model.rope_rates import Rope
from gangline_models.rope.base import PlainRope, RopeChoice

if TYPE_CHECKING:
    from gangline.config import Run


@dataclass
class FamilyConfig(ModelConfig):
    """Base options of every family's decoder."""

    file_options: ClassVar[tuple[str, ...]] = ("weights",)
    layout_options: ClassVar[tuple[str, ...]] = ("attention_backend",)

    dim: PositiveInt = 768  # hidden size: width of the residual stream
    layers: PositiveInt = 12  # number of decoder blocks (attention and feed-forward)
    heads: PositiveInt = 12  # number of attention (query) heads
    ffn_dim: PositiveInt = 2048  # intermediate size: width of the feed-forward
    tied: bool = False  # weight tying: the head shares the embedding's weight
    norm_eps: NonNegativeFloat = 1e-6  # epsilon of the norms, added to the mean square (RMSNorm) or variance
    # attention kernels on CUDA: auto (torch's choice), cudnn, flash (FlashAttention 2), efficient, math; fa3 and fa4
    # (FlashAttention 3 and 4) need a separate package
    attention_backend: AttentionBackend = "auto"
    # z-loss coefficient: weight of log²Z in the gradients; not in the reported loss (PaLM: 1e-4)
    z_loss: NonNegativeFloat = 0.0
    init_std: NonNegativeFloat = 0.02  # standard deviation of initial weights; output projections: / sqrt(2 · layers)
    weights: str | None = None  # Hugging Face directory of initial weights; null: random initialization

    def get_weights_directory(self) -> str | None:
        return self.weights

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        return self.heads

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.dim // self.heads

    def get_window(self, block: int) -> int | None:
        """Return the attention window of a block in tokens; None: full attention."""
        return None

    @property
    def windows(self) -> list[int | None]:
        """Attention window of each block; None: full attention."""
        return [self.get_window(block) for block in range(self.layers)]

    def get_rope(self, block: int, length: int) -> Rope | None:
        """Return the rotary positions of a block, for rows of `length` tokens; None: no rotary positions."""
        return None

    def check(self, run: Run) -> list[Problem]:
        problems = find_missing(self.attention_backend)
        if self.dim % self.heads == 0 or self.head_width != self.dim // self.heads:
            return problems
        what = f"model.dim={self.dim} is not divisible by model.heads={self.heads}"
        fix = f"Choose model.heads among {list_divisors(self.dim)}."
        return [*problems, Problem(what, "The head width is model.dim / model.heads.", fix)]


@dataclass
class RotaryConfig(FamilyConfig):
    """Options of families with rotary positions and grouped-query attention."""

    kv_heads: PositiveInt | None = None  # number of key-value heads (grouped-query attention); null: model.heads
    head_dim: PositiveInt | None = None  # width of an attention head; null: model.dim / model.heads
    rope_theta: PositiveFloat = 10_000.0  # RoPE base (theta)
    rope: RopeChoice = field(default_factory=PlainRope)

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def rotated(self) -> int:
        """Number of features per head that RoPE rotates."""
        return self.head_width

    def get_rope(self, block: int, length: int) -> Rope | None:
        from gangline.plugin.registry import build

        return Rope(self.rope_theta, build(self.rope, length), self.rotated)

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        if not problems and self.rotated % 2:
            what = f"RoPE would rotate {self.rotated} features per head, an odd number"
            problems.append(Problem(what, "RoPE rotates features in pairs.", "Set an even model.head_dim."))
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
    """Options of families with one sliding window for all blocks."""

    window: PositiveInt | None = None  # sliding window in tokens, including the query's own; null: full attention

    def get_window(self, block: int) -> int | None:
        return self.window


@dataclass
class PatternConfig(WindowedConfig):
    """Options of families with a sliding window in some blocks and full attention in others."""

    # number of blocks with full attention at the start of the model, if model.window is set
    full_first: NonNegativeInt = 0
    # interval of full-attention blocks (the last of every n blocks), if model.window is set; null: no such blocks
    full_every: PositiveInt | None = None

    def get_window(self, block: int) -> int | None:
        full = block < self.full_first or (self.full_every and (block + 1) % self.full_every == 0)
        return None if full else self.window


@dataclass
class TwoRopesConfig(PatternConfig):
    """Options of families with a separate, unscaled RoPE in blocks with a sliding window."""

    local_rope_theta: PositiveFloat = 10_000.0  # RoPE base (theta) of blocks with a sliding window

    def get_rope(self, block: int, length: int) -> Rope | None:
        return Rope(self.local_rope_theta) if self.get_window(block) else super().get_rope(block, length)
