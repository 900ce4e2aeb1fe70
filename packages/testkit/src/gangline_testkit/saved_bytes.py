"""Count the bytes that autograd saves in a forward pass, to check `Node.count_activation_bytes`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def count_saved_bytes(known: Iterable[Tensor], forward: Callable[[], object]) -> int:
    """Return the bytes that `forward()` saves for its backward pass; each storage counts once.

    known: tensors that do not count, such as weights and the batch. Saved tensors and the result of `forward` stay
    alive during the count, because freed and reused memory would count only once.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in known}
    sizes: dict[int, int] = {}
    alive: list[object] = []

    def pack(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in own:
            sizes[memory.data_ptr()] = memory.nbytes()
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        alive.append(forward())
    return sum(sizes.values())
