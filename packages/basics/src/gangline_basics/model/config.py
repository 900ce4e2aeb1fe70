"""Options of a decoder. Published sizes are in `gangline_basics.model.presets`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from gangline.config.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, list_divisors
from gangline.config.schema import ModelConfig
from gangline.errors import Problem
from gangline.plugin.parts import Part
from gangline_basics.model.attention_backend import AttentionBackend, find_missing

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline_basics.model.rope_rates import Rope

BUILD = "gangline_basics.model.plan:plan_decoder"


@dataclass
class DecoderConfig(ModelConfig):
    """Decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    file_options: ClassVar[tuple[str, ...]] = ("weights",)
    layout_options: ClassVar[tuple[str, ...]] = ("attention_backend",)

    dim: PositiveInt = 768  # width of the residual stream
    layers: PositiveInt = 12  # number of blocks of attention and feed-forward
    heads: PositiveInt = 12  # number of query heads of attention
    kv_heads: PositiveInt | None = None  # number of key and value heads (GQA), a divisor of heads; null: heads
    head_dim: PositiveInt | None = None  # width of a head; null: dim / heads
    ffn_dim: PositiveInt = 2048  # hidden (intermediate) size of the feed-forward
    qk_norm: bool = False  # RMSNorm of each query and key head, as in Qwen3
    tied: bool = False  # weight tying: the head uses the embedding's weight
    norm_eps: NonNegativeFloat = 1e-5  # epsilon added to the mean square in every RMSNorm
    rope_theta: PositiveFloat = 10_000.0  # RoPE base: base of the wavelengths of rotary positions
    rope_scaling_factor: Annotated[float, Ge(1)] | None = None  # RoPE scaling factor as in Llama 3.1; null: unscaled
    # RoPE wavelengths above rope_original_max_position / rope_low_freq_factor are multiplied by rope_scaling_factor
    rope_low_freq_factor: PositiveFloat = 1.0
    # RoPE wavelengths below rope_original_max_position / rope_high_freq_factor are not scaled
    rope_high_freq_factor: PositiveFloat = 4.0
    rope_original_max_position: PositiveInt = 8192  # RoPE context length before scaling, in tokens
    window: PositiveInt | None = None  # sliding window: tokens that a query sees, itself included; null: full attention
    full_every: PositiveInt | None = None  # interval between blocks with full attention if window is set; null: none
    attention_scale: PositiveFloat | None = None  # softmax scale of the attention scores; null: 1 / sqrt(head_dim)
    soft_cap: PositiveFloat | None = None  # logit soft cap: cap · tanh(scores / cap), as in Gemma 2; null: none
    sinks: bool = False  # attention sinks: a learned extra logit in each head's softmax, as in gpt-oss
    # attention kernels on CUDA: auto (torch's choice), cudnn, flash (FlashAttention 2), efficient, math; fa3 and fa4
    # (FlashAttention 3 and 4) need a separate package
    attention_backend: AttentionBackend = "auto"
    # z-loss coefficient: weight of log²Z in the gradients; not part of the reported loss (PaLM: 1e-4)
    z_loss: NonNegativeFloat = 0.0
    # standard deviation of initial weights; matrices that write to the residual stream: init_std / sqrt(2 · layers)
    init_std: NonNegativeFloat = 0.02
    weights: str | None = None  # Hugging Face directory of initial weights; null: random weights

    def get_weights_directory(self) -> str | None:
        return self.weights

    def preload(self, run: Run) -> list[str]:
        return ["gangline_basics.model.decoder"]

    def check(self, run: Run) -> list[Problem]:
        from gangline_basics.advice import suggest_nearest

        problems = find_missing(self.attention_backend)
        if self.head_dim is None and self.dim % self.heads:
            problems.append(
                Problem(
                    f"model.heads={self.heads} does not divide model.dim={self.dim}",
                    "If model.head_dim is null, the width of a head is dim / heads.",
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
                    f"model.head_dim={self.head_width} must be even",
                    "Rotary position embedding rotates pairs of features.",
                    f"Set model.head_dim={self.head_width + 1}.",
                )
            )
        if self.heads % self.key_heads:
            problems.append(
                Problem(
                    f"model.kv_heads={self.key_heads} does not divide model.heads={self.heads}",
                    "Each key-value head serves the same number of query heads.",
                    f"Choose model.kv_heads among {list_divisors(self.heads)}.",
                )
            )
        if self.rope_scaling_factor and self.rope_high_freq_factor <= self.rope_low_freq_factor:
            problems.append(
                Problem(
                    f"model.rope_high_freq_factor={self.rope_high_freq_factor} must be greater than "
                    f"model.rope_low_freq_factor={self.rope_low_freq_factor}",
                    "RoPE scaling interpolates between the two factors.",
                    f"Set model.rope_high_freq_factor={4 * self.rope_low_freq_factor}.",
                )
            )
        if self.full_every is not None and self.window is None:
            problems.append(
                Problem(
                    "model.full_every requires model.window: without a window, every block has full attention",
                    "",
                    "Set model.window=TOKENS, or model.full_every=null.",
                )
            )
        return problems

    def get_window(self, block: int) -> int | None:
        """Return the sliding window of a block in tokens, or None for full attention."""
        return None if self.full_every and (block + 1) % self.full_every == 0 else self.window

    def get_rope(self, block: int, length: int) -> Rope:
        """Return the rotary position embedding, equal for all blocks and sequence lengths."""
        from gangline_basics.model.rope_rates import BandScaling, Rope

        if self.rope_scaling_factor is None:
            return Rope(self.rope_theta)
        factors = self.rope_scaling_factor, self.rope_low_freq_factor, self.rope_high_freq_factor
        return Rope(self.rope_theta, BandScaling(*factors, self.rope_original_max_position))

    @property
    def key_heads(self) -> int:
        """Number of key and value heads: `kv_heads`, or `heads` if it is None."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Width of a head: `head_dim`, or dim / heads if it is None."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim


def _sort_by_distance(number: int, most: int) -> list[int]:
    """Return 1 to `most`, the nearest to `number` first."""
    return sorted(range(1, most + 1), key=lambda other: abs(other - number))


@dataclass
class Tiny(DecoderConfig):
    """Small byte-level decoder that trains in minutes on a CPU."""

    vocab_size: int = 256
    dim: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int | None = 2
    ffn_dim: int = 512
    tied: bool = True
    # Narrow layers need a larger std than 0.02: the loss after 300 steps was 0.08 nats lower.
    init_std: float = 0.05


PARTS = (
    Part(
        name="tiny",
        config=Tiny,
        summary="1.6 M parameters, byte-level; trains in minutes on a CPU",
        default=True,
        build=BUILD,
    ),
    Part(
        name="decoder",
        config=DecoderConfig,
        summary="decoder with the sizes that you set",
        words={"model_name_or_path": "model.weights=DIR  (gangline import DIR prints the complete command)"},
        synonyms={
            "dim": "width d_model hidden_size n_embd embed_dim model_dim",
            "layers": "depth n_layer n_layers num_layers num_hidden_layers",
            "heads": "n_head n_heads num_heads num_attention_heads",
            "kv_heads": "n_kv_head n_kv_heads num_kv_heads num_key_value_heads",
            "ffn_dim": "hidden hidden_dim d_ff ffn_hidden_size intermediate_size",
            "tied": "tie_embeddings tie_word_embeddings tie_weights tied_embeddings",
        },
        build=BUILD,
        capabilities={  # in an optional package; inherited by parts whose options derive from `DecoderConfig`
            "pretrained": "gangline_models.hugging_face.pretrained:HuggingFace",
            "hugging_face": "gangline_models.families.decoder:DecoderFormat",
        },
    ),
)
