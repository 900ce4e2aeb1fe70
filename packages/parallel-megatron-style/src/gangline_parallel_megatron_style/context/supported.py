"""The attention calls that ring attention supports. Imports no torch."""

from __future__ import annotations

from gangline.model.calls import AttentionCall


def explain_unsupported(call: AttentionCall) -> str:
    """Return, as text, the features of a call that ring attention does not support; "" if it supports the call.

    Ring attention supports `causal`, `window` and `scale`.
    """
    extras = {"a soft cap": call.soft_cap, "sinks": call.sinks, call.beyond: call.beyond or None}
    return " and ".join(name for name, value in extras.items() if value is not None)
