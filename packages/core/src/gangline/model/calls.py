"""Calls at a model's seams: what they compute, as data of its nodes. Torch-free.

A strategy that replaces the call at a seam (`gangline.plan.Seam`) computes exactly this, or refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

LOSS_CHUNK = 1 << 25  # logits that a loss has in float32 at a time: 128 MiB, for any size of the vocabulary


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Computation of `attention(q, k, v, document, position) -> out`, for each head, over the keys that a query sees.

        s = scale · q kᵀ      z = soft_cap · tanh(s / soft_cap)      out = exp(z) v / (exp(sink) + Σ exp(z))

    Keys of other documents are never visible.

    causal    query i sees key j only where j <= i
    window    and only where position i - window < position j; a query sees itself and window - 1 keys before it
    scale     of the scores; None: 1 / sqrt(width of a head)
    soft_cap  bounds the scores (Gemma 2, arXiv 2408.00118, section 2); None: no bound
    sinks     the name of a parameter of the module, a number per head, which joins the denominator only (Xiao et
              al., arXiv 2309.17453); it extends the call: `attention(q, k, v, document, position, sinks_H)`
    other     further computation, in words ("softplus in place of exp"); None: no more. A strategy that would
              replace the call refuses

    A declared call must have no parameter per head except the sinks, so that a strategy may pass it a subset of the
    heads. A subclass may add fields of what it computes: this holds for it too, and it counts as `other`.

    Raises ValueError for a window without a key or without causality, and for a soft cap that is not positive.
    """

    causal: bool = True
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: str | None = None
    other: str | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(f"window={self.window}: a window is of at least one key, and of causal attention")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap={self.soft_cap} must be positive")

    @property
    def beyond(self) -> str:
        """Computation beyond the formula above, in words; empty if there is none."""
        return self.other or ("" if type(self) is AttentionCall else type(self).__name__)

    def __str__(self) -> str:
        """Return the fields that differ from plain causal attention."""
        return _describe_changes(self) or "plain causal attention"


@dataclass(frozen=True, kw_only=True)
class LossCall:
    """Computation of `loss(hidden, weight, targets, loss_mask) -> sum`: cross-entropy of the logits hidden · weightᵀ.

    z         weight of log²Z, Z the sum of a token's exp(logits) (PaLM, arXiv 2204.02311, section 5): a term that joins
              the gradients by `forward_context.emit_loss` under the name "z_loss", and not the returned
              sum
    soft_cap  bounds the logits to cap · tanh(logits / cap) (Gemma 2, arXiv 2408.00118, section 2); None: no bound

    Raises ValueError for a negative weight, and for a soft cap that is not positive.
    """

    z: float = 0.0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap={self.soft_cap} must be positive")
        if self.z < 0:
            raise ValueError(f"z={self.z} must not be negative")

    def __str__(self) -> str:
        return _describe_changes(self) or "plain cross-entropy"


Call = AttentionCall | LossCall


def call_of(function: object) -> Call | None:
    """Return the call that a function at a seam declares (`computes`); None, for *unknown*, if it declares none."""
    own = getattr(function, "computes", None)
    return own if isinstance(own, Call) else None


def _describe_changes(call: Call) -> str:
    default = type(call)()
    return ", ".join(f"{name}={value}" for name, value in vars(call).items() if value != getattr(default, name))
