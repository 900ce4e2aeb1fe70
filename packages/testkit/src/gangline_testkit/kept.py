"""Count of the bytes that autograd saves in a forward pass, to check `Node.count_activation_bytes` of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def count_kept_bytes(known: Iterable[Tensor], forward: Callable[[], object]) -> int:
    """Return the bytes that `forward()` saves for its backward pass, each piece of memory once.

    known: tensors that exist anyway and do not count, such as weights and the batch. The result of `forward` is kept
    alive until all is counted: memory that is freed and reused would count as one piece.
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
