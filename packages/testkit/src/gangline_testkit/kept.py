"""What autograd keeps of a forward pass, in bytes: what `Node.count_activation_bytes` of a module is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def count_kept_bytes(known: Iterable[Tensor], forward: Callable[[], object]) -> int:
    """Bytes that `forward()` keeps for its backward pass, each piece of memory once.

    known: tensors that live anyway and do not count, such as weights and the batch. What `forward` gives is kept alive
    until all is counted: memory that is freed and used again would count as one piece.
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
