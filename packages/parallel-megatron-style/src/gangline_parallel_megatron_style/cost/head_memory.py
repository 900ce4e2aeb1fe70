"""Memory while the backward pass goes through a head that reads the embedding's matrix (tied weights) or has blocks
inside (multi-token prediction): last to first, a loss, then the block before it and its lookup.

The matrices of the vocabulary are read several times in one pass. Each use has its own gradient, in the dtype of the
product and then in that of gradients; the sum of the former waits for it, and what they come to is a third. Under tp
each is added where gradients are kept as soon as it is made, and the loss has its logits until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gangline_basics.explain.activations import ActivationSizes, count_further_loss
from gangline_parallel_megatron_style.cost import activations, memory
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.parameters import Array


def reads_the_embedding(case: Case) -> bool:
    """Whether the backward pass of the head gives gradients of the embedding's matrix, before that of the lookup."""
    plan = case.plan
    tied = plan.get_owner(f"{plan.head}.weight") == plan.get_owner(f"{plan.embed}.weight")
    return case.pp == 1 and (tied or bool(case.head_blocks))


def count_kept_logits(case: Case) -> int:
    """Bytes of logits and their gradient while that of the weight is made: over a vocabulary cut over tp the loss and
    its product are one operator, which lets go of what it keeps at its end; of chunks it keeps none.
    """
    vocabulary = case.plan.facts.get("vocab_size", 0)
    if case.tp == 1 or case.plan.facts.get("loss_chunk", case.tokens) < case.tokens:
        return 0
    return 2 * case.tokens * -(-vocabulary // case.tp) * case.bytes.compute


def iterate_head_moments(
    case: Case, arrays: list[Array], sizes: ActivationSizes, buffers: int
) -> Iterator[Counter[str]]:
    """Iterate over what is there beside what `peak_memory.iterate_rank_moments` adds.

    arrays: the head's own; buffers: bytes that travel.
    """
    blocks, each = list(case.head_blocks), count_further_loss(case.plan, sizes)
    in_backward = activations.count_head_bytes(case, sizes)["logits"] - (len(blocks) + 1) * each
    shared_grads, freed = Shared(case), 0
    cut = [array for array in arrays if memory.cuts_gradients(case, array.group)]
    whole, kept_logits = sum(array.size for array in cut) * case.bytes.gradient, count_kept_logits(case)
    for number in range(len(blocks), -1, -1):
        there = 0 if number == len(blocks) else whole  # memory of a group is asked for when its first gradient comes

        def make_moment(gradients: int, logits: int, made: int = 0, **more: int) -> Counter[str]:
            return Counter(gradients=gradients, logits=logits, buffers=shared_grads.waiting + buffers + made, **more)

        yield make_moment(there, in_backward + (number + 1) * each, activations=-freed)
        use_bytes = shared_grads.count_use(f"{case.plan.head}.weight")
        yield make_moment(whole, number * each + kept_logits, use_bytes, activations=-freed)
        shared_grads.wait(f"{case.plan.head}.weight", more=number > 0)
        if not number:
            return
        path = blocks[number - 1]
        again = activations.count_whole_block(case, path, sizes) - activations.count_block(case, path, sizes)
        largest = max((a.size for a in arrays if a.name.startswith(f"{path}.") and len(a.shape) > 1), default=0)
        yield make_moment(whole, number * each, largest * case.bytes.gradient, activations=again - freed)
        freed += activations.count_block(case, path, sizes)
        use_bytes = shared_grads.count_use(f"{case.plan.embed}.weight")
        yield make_moment(whole, number * each, use_bytes, activations=-freed)
        shared_grads.wait(f"{case.plan.embed}.weight", more=number > 1 or case.pp == 1)


class Shared:
    """Gradients of what is read several times, from the first use until the last."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._arrays = {a.name: a for place in ("embed", "head") for a in case.list_arrays(place) if a.trained}
        self._waiting: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        """Bytes of sums that wait for more."""
        return sum(self._waiting.values())

    def count_use(self, name: str) -> int:
        """Bytes of one more use, beside those that wait: its gradient in both dtypes; or it and what comes of both."""
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
        """That use is over; `more`: others follow."""
        owner = self._case.plan.get_owner(name)
        tied = owner == self._case.plan.get_owner(f"{self._case.plan.embed}.weight") and self._case.pp == 1
        if owner in self._arrays and (more or tied):
            self._waiting[owner] = count_between_uses(self._case, self._arrays[owner])
        else:
            self._waiting.pop(owner, None)


def count_between_uses(case: Case, array: Array) -> int:
    """Bytes of a gradient from its first part on until the last. Where they are added to those of other microbatches at
    once, they lie in these; what is cut has memory of its own for the whole, that of the head is counted with it.
    """
    apart = case.tp == 1 or (memory.cuts_gradients(case, array.group) and array.group.place == "embed")
    return array.size * case.bytes.gradient if apart else 0


def count_waiting_gradient(case: Case) -> int:
    """Bytes of the embedding's gradient that waits from the head on until the lookup's own, on the same rank."""
    if not reads_the_embedding(case):
        return 0
    owner = case.plan.get_owner(f"{case.plan.embed}.weight")
    return sum(
        count_between_uses(case, array) for array in case.list_arrays("embed") if array.name == owner and array.trained
    )


def find_lookup_moment(case: Case) -> Counter[str] | None:
    """The lookup's own gradient, that which waits for it, and what both come to; None where nothing is added up so."""
    waits = count_waiting_gradient(case) if case.tp == 1 else 0
    return Counter(buffers=3 * waits) if waits else None
