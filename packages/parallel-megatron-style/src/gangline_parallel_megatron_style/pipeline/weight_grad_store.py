"""Deferred weight gradients of a zero-bubble schedule: stored in action I, computed in action W.

with store.open(chunk, microbatch):     # I: layers defer closures into the store
    output.backward(gradient)
store.run(chunk, microbatch)            # W: run the closures in the order in which they were deferred
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from gangline.model.weight_grads import Closure, defer_gradients


class WeightGradStore:
    """Closures that compute deferred weight gradients, by chunk and microbatch."""

    def __init__(self) -> None:
        self._closures: dict[tuple[int, int], deque[Closure]] = defaultdict(deque)

    @contextmanager
    def open(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Store the weight gradients that layers defer inside the block. Raises RuntimeError if a store is open."""
        with defer_gradients(self._closures[chunk, microbatch].append):
            yield

    def run(self, chunk: int, microbatch: int) -> None:
        """Run the stored closures in the order in which they were deferred; release each closure after it ran."""
        closures = self._closures.pop((chunk, microbatch), deque[Closure]())
        while closures:
            closures.popleft()()

    def clear(self) -> None:
        """Drop all stored closures, for example of a failed step."""
        self._closures.clear()

    def __len__(self) -> int:
        """Return the number of stored closures."""
        return sum(map(len, self._closures.values()))
