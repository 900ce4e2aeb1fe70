"""Declarations of the calls at a model's seams: their computation, as data of the nodes. Torch-free.

A strategy that replaces the call at a seam (`gangline.plan.Seam`) must compute exactly the declaration, or refuse.
"""

from __future__ import annotations

from dataclasses import dataclass

LOSS_CHUNK = 1 << 25  # maximum number of float32 logits in a chunk of the loss: 128 MiB, for any vocabulary size


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Computation of `attention(q, k, v, document, position) -> out`, for each head, over the keys visible to a query.

        s = scale · q kᵀ      z = soft_cap · tanh(s / soft_cap)      out = exp(z) v / (exp(sink) + Σ exp(z))

    Keys of other documents are never visible.

    causal    key j is visible to query i only if j <= i
    window    sliding window: key j is visible to query i only if position j > position i - window, so a query sees
              itself and the window - 1 keys before it; None: no window
    scale     factor of the scores; None: 1 / sqrt(width of a head)
    soft_cap  bound of the scores (Gemma 2, arXiv 2408.00118, section 2); None: no bound
    sinks     name of a parameter of the module, one number per head, which is added to the denominator only (Xiao et
              al., arXiv 2309.17453) and is an argument of the call: `attention(q, k, v, document, position, sinks_H)`
    other     further computation, in words ("softplus instead of exp"), which no strategy may replace; None: none

    A declared call must have no parameter per head except the sinks, so that a strategy may pass it a subset of the
    heads. A subclass may add fields for its computation; the same condition holds, and it counts as `other`.

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
            raise ValueError(f"window={self.window}: a window must be at least 1 key, and the attention must be causal")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap={self.soft_cap} must be positive")

    @property
    def beyond(self) -> str:
        """Computation in addition to the formula of `AttentionCall`, in words; "" if there is none."""
        return self.other or ("" if type(self) is AttentionCall else type(self).__name__)

    def __str__(self) -> str:
        """Return the fields that differ from plain causal attention, as text."""
        return _describe_changes(self) or "plain causal attention"


@dataclass(frozen=True, kw_only=True)
class LossCall:
    """Computation of `loss(hidden, weight, targets, loss_mask) -> sum`: cross-entropy of the logits hidden · weightᵀ.

    z         weight of the z-loss log²Z, with Z the sum of a token's exp(logits) (PaLM, arXiv 2204.02311, section 5);
              it is added to the gradients by `forward_context.emit_loss` under the name "z_loss", and is not in the
              returned sum
    soft_cap  bound of the logits: cap · tanh(logits / cap) (Gemma 2, arXiv 2408.00118, section 2); None: no bound

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
    """Return the call that a function at a seam declares (`computes`); None (*unknown*) without a declaration."""
    own = getattr(function, "computes", None)
    return own if isinstance(own, Call) else None


def _describe_changes(call: Call) -> str:
    default = type(call)()
    return ", ".join(f"{name}={value}" for name, value in vars(call).items() if value != getattr(default, name))
