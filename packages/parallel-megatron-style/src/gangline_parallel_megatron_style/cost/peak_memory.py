"""Memory of a rank at its fullest: the moments of a backward pass, module by module, and which of them needs most.

Activations are most where the backward pass begins; gradients of the vocabulary's matrices are large when there are
none of a block, and the other way round. So nothing is added up that is not there at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gangline.explain import ActivationSizes, of_node
from gangline_parallel_megatron_style.cost import activations, memory
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.parameters import Array
from gangline_parallel_megatron_style.pipeline.actions import Schedule

Place = int | str  # the number of a block, or "embed" or "head"


def of_rank(
    case: Case, rank: int, schedule: Schedule | None, gpu: bool = True, state: Counter[str] | None = None
) -> Counter[str]:
    """Kind -> bytes for a rank of pipeline rank `rank`, at the moment when most is needed.

    state: `memory.state`, where it is at hand.
    """
    fullest = max(moments(case, rank, schedule, activations.sizes_of(case, gpu)), key=lambda moment: moment.total())
    return (memory.state(case, rank) if state is None else state) + fullest


def moments(case: Case, rank: int, schedule: Schedule | None, sizes: ActivationSizes) -> Iterator[Counter[str]]:
    """What is there beside `memory.state` while the backward pass goes through each module of a rank.

    With as many microbatches under way as the schedule has at most. Of gradients that are cut, two modules' are whole
    at a time: those of the module before are still being added. Weights that are cut are whole for the module at hand
    and those gathered ahead of it.
    """
    most = under_way(case, rank, schedule, sizes)
    for stage in case.stages_of(rank):
        held = _by_place(case, rank, stage)
        places = list(held)
        kept = {place: _kept(case, place, sizes) for place in places}
        whole = {place: _whole(case, arrays) for place, arrays in held.items()}
        before, freed = (
            whole[places[0]] if case.microbatches > 1 else 0,
            0,
        )  # of the microbatch before the last one arrives
        for index in reversed(range(len(places))):
            place = places[index]
            weights = sum(_gathered(case, held[other]) for other in _in_use(case, places, index))
            for found in _within(case, place, held[place], sizes):
                found.update(weights=weights, gradients=before, activations=most - freed)
                yield found
            freed, before = freed + kept[place], whole[place]


def under_way(case: Case, rank: int, schedule: Schedule | None, sizes: ActivationSizes) -> int:
    """Bytes of activations that a rank keeps at most, over the order of its schedule."""
    kept = []
    for stage in case.stages_of(rank):
        size = sum(activations.of_block(case, block, sizes) for block in case.stages[stage])
        size += activations.angles(case, sizes)
        if stage == case.last_stage:
            size += activations.head(case, sizes)["activations"]
        kept.append(size)
    if schedule is None:
        return kept[0]
    live = most = 0
    for action in schedule.actions[rank]:
        live += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind] * kept[action.chunk]
        most = max(most, live)
    return most


def _by_place(case: Case, rank: int, stage: int) -> dict[Place, list[Array]]:
    """The parameters of each module of a stage, in order; a tied one where its backward pass ends."""
    first, last = stage == 0, stage == case.last_stage
    found: dict[Place, list[Array]] = {"embed": []} if first else {}
    found |= {block: [] for block in case.stages[stage]}
    if last:
        found["head"] = []
    both = 0 in case.stages_of(rank)
    for array in case.held(rank):
        place = array.group.place
        if place == "embed" and not both:
            place = "head"  # a copy of a tied one
        if place in found:
            found[place].append(array)
    return found


def _kept(case: Case, place: Place, sizes: ActivationSizes) -> int:
    """Activations that are free once the backward pass is through with a module."""
    if isinstance(place, int):
        return activations.of_block(case, place, sizes)
    return activations.head(case, sizes)["activations"] if place == "head" else 0


def _whole(case: Case, arrays: list[Array]) -> int:
    return sum(array.size for array in arrays if memory.cuts_gradients(case, array.group)) * case.bytes.gradient


def _gathered(case: Case, arrays: list[Array]) -> int:
    groups = ((array.size, array.group) for array in arrays)
    return sum(size * memory.weight_bytes(case, group) for size, group in groups if memory.releases(case, group))


def _in_use(case: Case, places: list[Place], index: int) -> list[Place]:
    """The modules whose weights are whole in the backward pass of one; a lookup needs none."""
    return [place for place in places[max(0, index - case.config.prefetch) : index + 1] if place != "embed"]


def _within(case: Case, place: Place, arrays: list[Array], sizes: ActivationSizes) -> Iterator[Counter[str]]:
    """What comes and goes within a module: the hidden states of all tokens that tp gathers and scatters, what a block
    keeps that is computed again, logits, and the gradients of one module's own matrices before they are added to the
    others. These are in the dtype of the product first and then in that of gradients; where the whole is cut, memory
    for it is asked for when the first of them comes, and the first dtype is gone. Logits are gone before either.
    """
    width = case.bytes
    both = width.compute + width.gradient if width.compute != width.gradient else width.gradient
    made: Counter[str] = Counter()
    for array in arrays:
        if len(array.shape) > 1 and array.trained:
            each = width.gradient if memory.cuts_gradients(case, array.group) else both
            made[array.name.rsplit(".", len(array.shape) - 1)[0]] += array.size * each  # stacks with those beside them
    travels = 3 * case.tokens * case.width * width.compute if case.tp > 1 else 0  # in, its gradient, a term of that
    again = 0
    if place == "head":
        yield Counter({"logits": activations.head(case, sizes)["logits"], "buffers": travels})
    elif isinstance(place, int) and case.recomputed(place):
        whole = of_node(case.blocks[place], sizes, f"{case.plan.blocks}.{place}")
        again = whole - activations.of_block(case, place, sizes)
    gradients = max(made.values(), default=0)
    yield Counter({"gradients": _whole(case, arrays), "activations": again, "buffers": gradients + travels})
