"""Deferred weight gradients of a zero-bubble schedule: kept in action I, computed in action W.

with store.open(chunk, microbatch):     # I: what layers defer is kept
    output.backward(gradient)
store.run(chunk, microbatch)            # W: it runs, in the order in which it came
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from gangline.model.weight_grads import Closure, defer_gradients


class WeightGradStore:
    """What computes them, by chunk and microbatch."""

    def __init__(self) -> None:
        self._closures: dict[tuple[int, int], deque[Closure]] = defaultdict(deque)

    @contextmanager
    def open(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Keep what is deferred meanwhile. Raises RuntimeError where a store is open."""
        with defer_gradients(self._closures[chunk, microbatch].append):
            yield

    def run(self, chunk: int, microbatch: int) -> None:
        """Run what was kept, in the order in which it came, and let go of each closure once it has run."""
        closures = self._closures.pop((chunk, microbatch), deque[Closure]())
        while closures:
            closures.popleft()()

    def clear(self) -> None:
        """Forget what a step that failed has left."""
        self._closures.clear()

    def __len__(self) -> int:
        """How many closures are kept."""
        return sum(map(len, self._closures.values()))
