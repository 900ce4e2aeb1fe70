"""Data sources of a run over token stores: one store (data=tokens) or a weighted mixture (data=mix)."""
