"""What all families have: sizes, rotary positions, and the way from and to a config.json. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gangline import Problem, UserError
from gangline.config import ModelConfig, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, listed_divisors
from gangline.config.fields import stated
from gangline_basics.model.rope_rates import Rope
from gangline_models.hugging_face.config_reader import ConfigReader
from gangline_models.hugging_face.layers import layer_types
from gangline_models.hugging_face.rope import read_rope
from gangline_models.rope.base import PlainRope, RopeChoice

if TYPE_CHECKING:
    from gangline.config import Run

OPENS = {"rope": "plain"}  # of every part whose family has rotary positions
TRAINING = {"weights", "init_std", "z_loss"}  # what others say nothing of


@dataclass
class FamilyConfig(ModelConfig):
    """A decoder as a family has it.

    A family says how its config.json puts things: `model_type`; `same`, option -> their field of the same value;
    `absent`, their fields that must have one value, for it is all that the family's tree computes; `silent`, what an
    option is where a file does not say it, which is what their class has for it, not what ours has; `nullable`, the
    options that a file may give as null. What is said otherwise goes through `read_more` and `more_json`.
    """

    file_options: ClassVar[tuple[str, ...]] = ("weights",)
    model_type: ClassVar[str] = ""
    same: ClassVar[Mapping[str, str]] = {}
    absent: ClassVar[Mapping[str, Any]] = {}
    silent: ClassVar[Mapping[str, Any]] = {}
    nullable: ClassVar[frozenset[str]] = frozenset()

    dim: PositiveInt = 768  # width of the residual stream
    layers: PositiveInt = 12  # blocks of attention and feed-forward
    heads: PositiveInt = 12  # of attention: queries
    hidden: PositiveInt = 2048  # width of the feed-forward
    tied: bool = False  # the head multiplies with the embedding's weight
    norm_eps: NonNegativeFloat = 1e-6  # added to the mean square, or the variance, in every norm
    z_loss: NonNegativeFloat = 0.0  # weight of log²Z of the logits: joins the gradients, not the loss (PaLM: 1e-4)
    init_std: NonNegativeFloat = 0.02  # of every matrix; those that write to the residual stream: / sqrt(2 · layers)
    weights: str | None = None  # a Hugging Face directory to start from instead of drawn weights

    def pretrained(self) -> str | None:
        return self.weights

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return self.heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.dim // self.heads

    def window_of(self, block: int) -> int | None:
        """The window of that block, or None."""
        return None

    @property
    def windows(self) -> list[int | None]:
        """Of each block."""
        return [self.window_of(block) for block in range(self.layers)]

    def rope_of(self, block: int, length: int) -> Rope | None:
        """The rotary positions of that block, in rows of `length` tokens; None: it has none."""
        return None

    def check(self, run: Run) -> list[Problem]:
        if self.dim % self.heads == 0 or self.head_width != self.dim // self.heads:
            return []
        what = f"model.dim={self.dim} does not divide into model.heads={self.heads}"
        mend = f"Choose model.heads among {listed_divisors(self.dim)}."
        return [Problem(what, "Where nothing else is said a head is dim / heads wide.", mend)]

    @classmethod
    def of_hugging_face(cls, directory: str | Path, config: dict[str, Any]) -> FamilyConfig:
        reader = ConfigReader(directory, config)
        given: dict[str, Any] = {}
        ranges = stated(cls)
        for ours, theirs in cls.same.items():
            if ours not in cls.silent:
                given[ours] = reader.need(theirs, ranges[ours])
            else:
                read = reader.take if ours in cls.nullable else reader.given
                given[ours] = read(theirs, cls.silent[ours], ranges[ours])
        for name, value in cls.absent.items():
            reader.only(name, value)
        given |= cls.read_more(reader, given)
        reader.finish()
        return cls(**given, weights=str(directory))

    @classmethod
    def read_more(cls, reader: ConfigReader, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options that need more than a look; given: those that `same` has read."""
        return {}

    def to_hugging_face(self, dtype: str, max_position: int) -> dict[str, Any]:
        filled = self.computed()
        return {
            "architectures": list(self.architectures[:1]),
            "model_type": self.model_type,
            **{theirs: filled[ours] for ours, theirs in self.same.items()},
            **self.absent,
            "max_position_embeddings": max_position,
            **self.more_json(max_position),
            **self._special_tokens(),
            "torch_dtype": dtype,
        }

    def _special_tokens(self) -> dict[str, Any]:
        """Those of the directory that the model began with; without one, none: not what transformers would take."""
        there = Path(self.weights or ".") / "config.json"
        held = json.loads(there.read_text(encoding="utf-8")) if self.weights and there.is_file() else {}
        return {name: held.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}

    def more_json(self, max_position: int) -> dict[str, Any]:
        """The fields that `read_more` reads."""
        return {}

    def computed(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if name not in TRAINING}


@dataclass
class RotaryConfig(FamilyConfig):
    """With rotary positions, and key heads that may be fewer."""

    silent_theta: ClassVar[float] = 10_000.0  # of a file that does not say it
    nullable: ClassVar[frozenset[str]] = frozenset(("kv_heads",))

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

    def rope_of(self, block: int, length: int) -> Rope | None:
        from gangline.plugin.registry import build

        return Rope(self.rope_theta, build(self.rope, length), self.rotated)

    def check(self, run: Run) -> list[Problem]:
        found = super().check(run)
        if not found and self.rotated % 2:
            what = f"of each head {self.rotated} features are rotated"
            found.append(Problem(what, "Rotary positions turn features in pairs.", "Take an even model.head_dim."))
        if self.heads % self.key_heads:
            found.append(
                Problem(
                    f"model.kv_heads={self.key_heads} does not divide model.heads={self.heads}",
                    "Each key head serves the same number of query heads.",
                    f"Choose model.kv_heads among {listed_divisors(self.heads)}.",
                )
            )
        return found

    @classmethod
    def read_more(cls, reader: ConfigReader, given: Mapping[str, Any]) -> dict[str, Any]:
        return read_rope(reader, cls.silent_theta)

    def more_json(self, max_position: int) -> dict[str, Any]:
        return {
            "rope_parameters": {"rope_theta": self.rope_theta, **self.rope.written()},
            "max_position_embeddings": self.rope.max_position(max_position),
        }

    def computed(self) -> dict[str, Any]:
        return {**super().computed(), "kv_heads": self.key_heads, "head_dim": self.head_width}


@dataclass
class WindowedConfig(RotaryConfig):
    """All blocks may see a window."""

    window: PositiveInt | None = None  # tokens that a query sees, itself among them; null: all before it

    def window_of(self, block: int) -> int | None:
        return self.window


@dataclass
class PatternConfig(WindowedConfig):
    """Some blocks see a window, others all."""

    full_first: NonNegativeInt = 0  # with a window: so many blocks before the first that has it
    full_every: PositiveInt | None = None  # with a window: of so many blocks the last one sees all; null: none does

    def window_of(self, block: int) -> int | None:
        full = block < self.full_first or (self.full_every and (block + 1) % self.full_every == 0)
        return None if full else self.window


@dataclass
class TwoRopesConfig(PatternConfig):
    """Blocks with a window have rotary positions of their own base, and only the others' are scaled."""

    local_rope_theta: PositiveFloat = 10_000.0  # base of the wavelengths in blocks with a window

    def rope_of(self, block: int, length: int) -> Rope | None:
        return Rope(self.local_rope_theta) if self.window_of(block) else super().rope_of(block, length)

    def more_json(self, max_position: int) -> dict[str, Any]:
        said = super().more_json(max_position)
        if said["rope_parameters"].get("truncate", True) is not True:
            raise UserError(
                "a model with model.rope.truncate=false and layers of two kinds has no Hugging Face architecture.",
                "transformers passes over truncate where layers differ, and would compute something else.",
            )
        local = {"rope_type": "default", "rope_theta": self.local_rope_theta}
        return said | {
            "rope_parameters": {"full_attention": said["rope_parameters"], "sliding_attention": local},
            "sliding_window": self.window,
            "layer_types": layer_types(self.windows),
        }


SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
