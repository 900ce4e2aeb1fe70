"""The options of a decoder. Published sizes are in `gangline_basics.model.presets`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from gangline.config.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, list_divisors
from gangline.config.schema import ModelConfig
from gangline.errors import Problem
from gangline.plugin.parts import Part

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline_basics.model.rope_rates import Rope

BUILD = "gangline_basics.model.plan:plan_decoder"


@dataclass
class DecoderConfig(ModelConfig):
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    file_options: ClassVar[tuple[str, ...]] = ("weights",)

    dim: PositiveInt = 768  # width of the residual stream
    layers: PositiveInt = 12  # blocks of attention and feed-forward
    heads: PositiveInt = 12  # of attention: queries
    kv_heads: PositiveInt | None = None  # key and value heads, each for heads / kv_heads query heads; null: heads
    head_dim: PositiveInt | None = None  # width of a head; null: dim / heads
    hidden: PositiveInt = 2048  # width of the feed-forward
    qk_norm: bool = False  # RMSNorm of each query and key head, as in Qwen3
    tied: bool = False  # the head multiplies with the embedding's weight
    norm_eps: NonNegativeFloat = 1e-5  # added to the mean square in every RMSNorm
    rope_theta: PositiveFloat = 10_000.0  # base of the wavelengths of rotary positions
    rope_scaling_factor: Annotated[float, Ge(1)] | None = None  # long wavelengths grow by this (Llama 3.1)
    rope_low_freq_factor: PositiveFloat = 1.0  # wavelengths above rope_original_max_position / this grow in full
    rope_high_freq_factor: PositiveFloat = 4.0  # wavelengths below rope_original_max_position / this stay
    rope_original_max_position: PositiveInt = 8192  # sequence length that the rotary positions were made for
    window: PositiveInt | None = None  # tokens that a query sees, itself among them; null: all before it
    full_every: PositiveInt | None = None  # with a window: of so many blocks the last one sees all; null: none does
    attention_scale: PositiveFloat | None = None  # of the scores of attention; null: 1 / sqrt(head_dim)
    soft_cap: PositiveFloat | None = None  # bounds the scores to cap · tanh(scores / cap), as in Gemma 2; null: none
    sinks: bool = False  # a learned number per head joins the sum of its softmax, as in gpt-oss
    z_loss: NonNegativeFloat = 0.0  # weight of log²Z of the logits: joins the gradients, not the loss (PaLM: 1e-4)
    init_std: NonNegativeFloat = 0.02  # of every matrix; those that write to the residual stream: / sqrt(2 · layers)
    weights: str | None = None  # a Hugging Face directory to start from instead of drawn weights

    def get_weights_directory(self) -> str | None:
        return self.weights

    def preload(self, run: Run) -> list[str]:
        return ["gangline_basics.model.decoder"]

    def check(self, run: Run) -> list[Problem]:
        from gangline_basics.advice import suggest_nearest

        problems = []
        if self.head_dim is None and self.dim % self.heads:
            problems.append(
                Problem(
                    f"model.dim={self.dim} does not divide into model.heads={self.heads}",
                    "Without model.head_dim a head is dim / heads wide.",
                    suggest_nearest(
                        run,
                        (
                            {"model.heads": heads}
                            for heads in _sort_by_distance(self.heads, self.dim)
                            if self.dim % heads == 0
                        ),
                    ),
                )
            )
        elif self.head_width % 2:
            problems.append(
                Problem(
                    f"model.head_dim={self.head_width} is odd",
                    "Rotary positions turn features in pairs.",
                    f"Take model.head_dim={self.head_width + 1}.",
                )
            )
        if self.heads % self.key_heads:
            problems.append(
                Problem(
                    f"model.kv_heads={self.key_heads} does not divide model.heads={self.heads}",
                    "Each key head serves the same number of query heads.",
                    f"Choose model.kv_heads among {list_divisors(self.heads)}.",
                )
            )
        if self.rope_scaling_factor and self.rope_high_freq_factor <= self.rope_low_freq_factor:
            problems.append(
                Problem(
                    f"model.rope_high_freq_factor={self.rope_high_freq_factor} is not more than "
                    f"model.rope_low_freq_factor={self.rope_low_freq_factor}",
                    "Wavelengths between the two grow the less the shorter they are.",
                    f"Take model.rope_high_freq_factor={4 * self.rope_low_freq_factor}.",
                )
            )
        if self.full_every is not None and self.window is None:
            problems.append(
                Problem("model.full_every: without a window all blocks see all", "", "Give model.window too.")
            )
        return problems

    def get_window(self, block: int) -> int | None:
        """The window of that block, or None."""
        return None if self.full_every and (block + 1) % self.full_every == 0 else self.window

    def get_rope(self, block: int, length: int) -> Rope:
        """Rotary positions, the same for all blocks and lengths."""
        from gangline_basics.model.rope_rates import BandScaling, Rope

        if self.rope_scaling_factor is None:
            return Rope(self.rope_theta)
        factors = self.rope_scaling_factor, self.rope_low_freq_factor, self.rope_high_freq_factor
        return Rope(self.rope_theta, BandScaling(*factors, self.rope_original_max_position))

    @property
    def key_heads(self) -> int:
        """`kv_heads` with its default filled in."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """`head_dim` with its default filled in."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim


def _sort_by_distance(number: int, most: int) -> list[int]:
    """1 to `most`, the nearest to a number first."""
    return sorted(range(1, most + 1), key=lambda other: abs(other - number))


@dataclass
class Tiny(DecoderConfig):
    """Bytes in, minutes on a CPU."""

    vocab_size: int = 256
    dim: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int | None = 2
    hidden: int = 512
    tied: bool = True
    # Narrow layers want more than 0.02: measured 0.08 nats better after 300 steps.
    init_std: float = 0.05


PARTS = (
    Part(name="tiny", config=Tiny, summary="1.6 M parameters on bytes: minutes on a CPU", default=True, build=BUILD),
    Part(
        name="decoder",
        config=DecoderConfig,
        summary="any decoder: every size is yours to give",
        words={"model_name_or_path": "model.weights=DIR  (gangline import DIR prints the complete command)"},
        synonyms={
            "dim": "width d_model hidden_size n_embd embed_dim model_dim",
            "layers": "depth n_layer n_layers num_layers num_hidden_layers",
            "heads": "n_head n_heads num_heads num_attention_heads",
            "kv_heads": "n_kv_head n_kv_heads num_kv_heads num_key_value_heads",
            "hidden": "d_ff ffn_dim ffn_hidden_size intermediate_size",
            "tied": "tie_embeddings tie_word_embeddings tie_weights tied_embeddings",
        },
        build=BUILD,
        capabilities={  # of a package that may be missing; parts whose options derive from these have the same
            "pretrained": "gangline_models.hugging_face.pretrained:HuggingFace",
            "hugging_face": "gangline_models.families.decoder:DecoderFormat",
        },
    ),
)
