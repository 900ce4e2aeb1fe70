"""What ring attention computes of what a model may declare. Torch-free."""

from __future__ import annotations

from gangline.model.calls import AttentionCall


def explain_unsupported(call: AttentionCall) -> str:
    """What of the call ring attention has not, in words; empty where it has all. It has causal, window and scale."""
    extras = {"a soft cap": call.soft_cap, "sinks": call.sinks, call.beyond: call.beyond or None}
    return " and ".join(name for name, value in extras.items() if value is not None)
