"""How tokens are drawn, and what comes of it. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gangline.errors import UserError

Why = Literal["length", "end", "stop"]
Stop = Callable[[list[int]], bool]  # whether a text of these tokens is done


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How each token is drawn from softmax(logits / temperature), and when a text ends.

    tokens       that are written after each prompt at most
    temperature  0 takes the likeliest token
    top_k        draw from so many of the likeliest alone; None: from all
    top_p        draw from the likeliest that together have this probability (nucleus; arXiv 1904.09751, section 3.1)
    seed         a token is a function of (seed, number of the prompt, tokens written before it) and the probabilities
    ends         tokens that end a text; they are no part of it

    Raises ValueError for what has no meaning.
    """

    tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    ends: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.tokens < 0 or not 0 <= self.temperature < math.inf:
            raise ValueError(f"tokens={self.tokens} and temperature={self.temperature} must be finite and not negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} is no number of tokens to draw from")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]")


@dataclass(frozen=True)
class Written:
    """The tokens after one prompt, and why there are no more: an end token came, a stop string, or enough of them."""

    tokens: list[int]
    why: Why


def check_lengths(prompts: Sequence[Sequence[int]], tokens: int, context: int) -> None:
    """Refuse an empty prompt, and a text that would grow longer than what the model was trained on (`context`)."""
    for number, prompt in enumerate(prompts, 1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise UserError(f"{which} has no token.", "There is nothing to go on from.")
        if len(prompt) + tokens > context:
            left = context - len(prompt)
            raise UserError(
                f"{which} has {len(prompt)} tokens, and with {tokens} more that is beyond the context of {context}.",
                "The model was trained on rows of batch.sequence_length tokens, and knows no positions behind them.",
                f"Take {left} tokens at most." if left > 0 else "Take a shorter prompt.",
            )
