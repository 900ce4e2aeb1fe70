"""Memory during the backward pass of a head with tied weights or with inner blocks (multi-token prediction, MTP).

The backward pass goes from last to first: for each MTP block its loss, the block, and its embedding lookup; at the end
the main loss.

One pass uses the vocabulary matrices (embedding and output) several times. Each use has its own gradient, in the
matmul's dtype and then in the gradient dtype. The sum of the earlier gradients is a second buffer, and the new sum is a
third. Under tp each gradient is added in place to the stored gradient as soon as it is computed, and the loss keeps its
logits until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gangline_basics.explain.activations import ActivationSizes, count_further_loss
from gangline_parallel_megatron_style.cost import activations, memory
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.parameters import Array


def reads_the_embedding(case: Case) -> bool:
    """Return whether the head's backward pass computes a gradient of the embedding matrix, before the lookup's does."""
    plan = case.plan
    tied = plan.get_owner(f"{plan.head}.weight") == plan.get_owner(f"{plan.embed}.weight")
    return case.pp == 1 and (tied or bool(case.head_blocks))


def count_logits_bytes(case: Case) -> int:
    """Return the bytes of logits and their gradient while the weight's gradient is computed; 0 without tp.

    Under tp the loss and its matmul are one operator, which frees its saved tensors at its end; with a chunked loss it
    saves no logits, and the result is 0.
    """
    vocabulary = case.plan.facts.get("vocab_size", 0)
    if case.tp == 1 or case.plan.facts.get("loss_chunk", case.tokens) < case.tokens:
        return 0
    return 2 * case.tokens * -(-vocabulary // case.tp) * case.bytes.compute


def iterate_head_moments(
    case: Case, arrays: list[Array], sizes: ActivationSizes, buffers: int
) -> Iterator[Counter[str]]:
    """Yield the head's memory, kind -> bytes, at each possible peak of its backward pass.

    The result leaves out memory that `iterate_rank_moments` counts.

    arrays   parameters of the head
    buffers  bytes of communication buffers
    """
    blocks, each = list(case.head_blocks), count_further_loss(case.plan, sizes)
    in_backward = activations.count_head_bytes(case, sizes)["logits"] - (len(blocks) + 1) * each
    shared_grads, freed = Shared(case), 0
    cut = [array for array in arrays if memory.cuts_gradients(case, array.group)]
    whole, logits_bytes = sum(array.size for array in cut) * case.bytes.gradient, count_logits_bytes(case)
    for number in range(len(blocks), -1, -1):
        # the gradient memory of a parameter group is allocated at the group's first gradient
        there = 0 if number == len(blocks) else whole

        def make_moment(gradients: int, logits: int, made: int = 0, **more: int) -> Counter[str]:
            return Counter(gradients=gradients, logits=logits, buffers=shared_grads.waiting + buffers + made, **more)

        yield make_moment(there, in_backward + (number + 1) * each, activations=-freed)
        use_bytes = shared_grads.count_use(f"{case.plan.head}.weight")
        yield make_moment(whole, number * each + logits_bytes, use_bytes, activations=-freed)
        shared_grads.wait(f"{case.plan.head}.weight", more=number > 0)
        if not number:
            return
        path = blocks[number - 1]
        recomputed_bytes = activations.count_whole_block(case, path, sizes) - activations.count_block(case, path, sizes)
        largest = max((a.size for a in arrays if a.name.startswith(f"{path}.") and len(a.shape) > 1), default=0)
        yield make_moment(whole, number * each, largest * case.bytes.gradient, activations=recomputed_bytes - freed)
        freed += activations.count_block(case, path, sizes)
        use_bytes = shared_grads.count_use(f"{case.plan.embed}.weight")
        yield make_moment(whole, number * each, use_bytes, activations=-freed)
        shared_grads.wait(f"{case.plan.embed}.weight", more=number > 1 or case.pp == 1)


class Shared:
    """Gradient memory of shared (tied) weights, held between their first and last use in a pass."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._arrays = {a.name: a for place in ("embed", "head") for a in case.list_arrays(place) if a.trained}
        self._waiting: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        """Return the bytes of gradient sums that wait for the gradients of further uses."""
        return sum(self._waiting.values())

    def count_use(self, name: str) -> int:
        """Return the additional bytes during the backward pass of one use of a weight.

        The bytes hold the gradient in the matmul's dtype and in the gradient dtype, or the gradient and its sum with
        earlier gradients.
        """
        owner, width = self._case.plan.get_owner(name), self._case.bytes
        if owner not in self._arrays:
            return 0
        other = width.compute if width.compute != width.gradient else 0
        both = width.gradient + other
        if self._case.tp > 1:
            first = owner not in self._waiting
            return self._arrays[owner].size * both + first * count_between_uses(self._case, self._arrays[owner])
        return self._arrays[owner].size * max(both, 2 * width.gradient if owner in self._waiting else 0)

    def wait(self, name: str, more: bool) -> None:
        """Record the end of the backward pass of one use of a weight. `more`: whether other uses follow."""
        owner = self._case.plan.get_owner(name)
        tied = owner == self._case.plan.get_owner(f"{self._case.plan.embed}.weight") and self._case.pp == 1
        if owner in self._arrays and (more or tied):
            self._waiting[owner] = count_between_uses(self._case, self._arrays[owner])
        else:
            self._waiting.pop(owner, None)


def count_between_uses(case: Case, array: Array) -> int:
    """Return the bytes of a weight's gradient between the backward passes of its first and its last use.

    Under tp each gradient is added in place to the stored gradient, and needs no memory, except if the stored gradient
    of the embedding is sharded: then the full gradient counts. The full gradient of the head is counted with the head.
    """
    apart = case.tp == 1 or (memory.cuts_gradients(case, array.group) and array.group.place == "embed")
    return array.size * case.bytes.gradient if apart else 0


def count_waiting_gradient(case: Case) -> int:
    """Return the bytes of the embedding gradient that the head computes, held until the lookup's gradient is added."""
    if not reads_the_embedding(case):
        return 0
    owner = case.plan.get_owner(f"{case.plan.embed}.weight")
    return sum(
        count_between_uses(case, array) for array in case.list_arrays("embed") if array.name == owner and array.trained
    )


def find_lookup_moment(case: Case) -> Counter[str] | None:
    """Return the memory, kind -> bytes, when the gradients of the lookup and of the head are added.

    The bytes hold both gradients and their sum. None if no gradient of the head waits, and under tp, which adds the
    gradients in place.
    """
    waits = count_waiting_gradient(case) if case.tp == 1 else 0
    return Counter(buffers=3 * waits) if waits else None
