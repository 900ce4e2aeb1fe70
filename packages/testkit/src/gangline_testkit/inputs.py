"""Synthetic batches: every number is a function of (step, sample), in any layout."""

from __future__ import annotations

import numpy as np
import torch

from gangline.batch import Batch

Kind = str  # "ragged": loss masks of every length, including 0; "whole": full masks; "documents": two per sample


def make_sample(number: int, length: int, vocab_size: int, kind: Kind) -> dict[str, np.ndarray]:
    """Return sample `number`: T+1 tokens, the loss mask, and for "documents" the document numbers and positions."""
    draws = np.random.Generator(np.random.Philox(key=number + 1))
    sample: dict[str, np.ndarray] = {
        "tokens": draws.integers(0, vocab_size - 1, length + 1)
    }  # the last token is reserved for the suites
    sample["loss_mask"] = np.ones(length, dtype=bool)
    if kind == "ragged":
        sample["loss_mask"] = np.arange(length) < (number * 5) % (length + 3) - 1
    if kind == "documents":
        border = 1 + int(draws.integers(0, length - 1))
        places = np.arange(length)
        sample["document"] = (places >= border).astype(np.int64)
        sample["position"] = np.where(places < border, places, places - border)
        sample["loss_mask"] = places != border - 1
    return sample


def make_microbatch(numbers: list[int], step: int, length: int, vocab_size: int, kind: Kind) -> Batch:
    """Return the samples with these numbers as one microbatch."""
    rows = [make_sample(number, length, vocab_size, kind) for number in numbers]

    def stack_rows(name: str) -> torch.Tensor | None:
        return torch.from_numpy(np.stack([row[name] for row in rows])) if name in rows[0] else None

    tokens, mask, position = stack_rows("tokens"), stack_rows("loss_mask"), stack_rows("position")
    assert tokens is not None
    assert mask is not None
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        targets=tokens[:, 1:].contiguous(),
        loss_mask=mask,
        position=torch.arange(length).expand(len(rows), length) if position is None else position,
        sample=torch.tensor(numbers),
        document=stack_rows("document"),
        step=step,
    )


def make_full_batch(tokens_BT: torch.Tensor) -> Batch:
    """Return these tokens as a microbatch for tests of logits and sizes: full loss mask, targets equal to tokens."""
    rows, length = tokens_BT.shape
    position = torch.arange(length).expand(rows, length)
    return Batch(tokens_BT, tokens_BT, torch.ones(rows, length, dtype=torch.bool), position, torch.arange(rows))


def share(
    step: int, index: int, width: int, *, size: int, micro_size: int, length: int, vocab_size: int, kind: Kind
) -> list[Batch]:
    """Return the microbatches of the data rank `index` of `width`: a contiguous part of a step's `size` samples."""
    own = size // width
    first = step * size + index * own
    return [
        make_microbatch(list(range(start, start + micro_size)), step, length, vocab_size, kind)
        for start in range(first, first + own, micro_size)
    ]
