"""Low-rank adapters: a model edit that wraps linears and trains what it adds."""
