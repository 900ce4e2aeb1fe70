"""LoRA, low-rank adapters: a model edit that wraps linears and trains only the adapters."""
