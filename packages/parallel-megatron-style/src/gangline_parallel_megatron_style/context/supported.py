"""The attention calls that ring attention supports. Torch-free."""

from __future__ import annotations

from gangline.model.calls import AttentionCall


def explain_unsupported(call: AttentionCall) -> str:
    """Return in words the parts of the call that ring attention lacks, or "". It supports causal, window and scale."""
    extras = {"a soft cap": call.soft_cap, "sinks": call.sinks, call.beyond: call.beyond or None}
    return " and ".join(name for name, value in extras.items() if value is not None)
