"""Notices about skipped tensors of a directory. Torch-free."""

from __future__ import annotations


def report_skipped(weights: str | None, beginning: str) -> list[str]:
    """Return a notice of skipped multi-token prediction weights if tensor names start with `beginning`, else []."""
    from gangline_models.hugging_face.tensors import list_tensor_names

    if weights is None or not any(name.startswith(beginning) for name in list_tensor_names(weights)):
        return []
    return [f"model.weights={weights}: skipping the weights for multi-token prediction ({beginning}*)."]
