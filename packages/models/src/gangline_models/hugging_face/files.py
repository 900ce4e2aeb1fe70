"""Which of a directory's tensors are passed over. Torch-free."""

from __future__ import annotations


def report_skipped(weights: str | None, beginning: str) -> list[str]:
    """The notice of tensors whose names begin so, which predict further tokens; none where there are none."""
    from gangline_models.hugging_face.tensors import list_tensor_names

    if weights is None or not any(name.startswith(beginning) for name in list_tensor_names(weights)):
        return []
    return [f"model.weights={weights}: its weights that predict further tokens ({beginning}*) are passed over."]
