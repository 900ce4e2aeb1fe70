"""Putting off the gradients of weights: a zero-bubble schedule computes them while its rank would wait.

    with store.open(chunk, microbatch):          # I: the layers call `later(closure)`, and the closures are kept
        output.backward(gradient)
    store.run(chunk, microbatch)                 # W: they run, in the order in which they came

Modules of other packages reach it by `inside.weight_gradient`. Which store is open is one value of the module, no
context variable: autograd runs the backward pass of a GPU in a thread of its own, to which a context variable does not
travel.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from gangline import inside
from gangline_parallel_megatron_style.deposit import deposit

Closure = Callable[[], None]

_kept: deque[Closure] | None = None  # where `later` puts closures


def later(closure: Closure) -> None:
    """Run `closure` now, or keep it where a store is open."""
    if _kept is None:
        closure()
    else:
        _kept.append(closure)


def is_open() -> bool:
    """Whether a store is open: weight gradients of the backward pass under way come later."""
    return _kept is not None


class WeightGradStore:
    """What was put off, by chunk and microbatch."""

    def __init__(self) -> None:
        self._put_off: dict[tuple[int, int], deque[Closure]] = defaultdict(deque)

    @contextmanager
    def open(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Keep what comes meanwhile under this chunk and microbatch. Raises RuntimeError where a store is open."""
        global _kept
        if _kept is not None:
            raise RuntimeError("a store of weight gradients is open already")
        _kept = self._put_off[chunk, microbatch]
        try:
            with inside.putting_off(_keep):
                yield
        finally:
            _kept = None

    def run(self, chunk: int, microbatch: int) -> None:
        """Run what was kept, in the order in which it came, and let go of each closure once it has run."""
        closures = self._put_off.pop((chunk, microbatch), deque[Closure]())
        while closures:
            closures.popleft()()

    def clear(self) -> None:
        """Forget what a step that failed has left."""
        self._put_off.clear()

    def __len__(self) -> int:
        """How many closures are kept."""
        return sum(map(len, self._put_off.values()))


def _keep(weight: Tensor, compute: Callable[[], Tensor]) -> None:
    later(lambda: deposit(weight, compute()))
