"""Memory of a rank at its fullest: the moments of a backward pass, module by module, and which of them needs most.

Activations are most where the backward pass begins; gradients of the vocabulary's matrices are large when there are
none of a block, and the other way round. So nothing is added up that is not there at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from gangline_basics.explain.activations import ActivationSizes
from gangline_parallel_megatron_style.cost import activations, head_memory, memory
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.parameters import Array
from gangline_parallel_megatron_style.pipeline.actions import Schedule

Place = int | str  # the number of a block, or "embed" or "head"


def count_peak(case: Case, rank: int, schedule: Schedule | None, gpu: bool = True) -> Counter[str]:
    """Kind -> bytes for a rank of pipeline rank `rank`, at the moment when most is needed."""
    sizes = activations.sizes_of(case, gpu)
    return sum_moment(
        memory.state(case, rank), fullest(case, rank, sizes), count_under_way(case, rank, schedule, sizes)
    )


def sum_moment(state: Counter[str], moment: Counter[str], activation_bytes: int) -> Counter[str]:
    """All that is there at a moment: `memory.state`, what `moments` gives, and the activations of `count_under_way`."""
    found = Counter(moment)
    found["activations"] += activation_bytes
    return state + found


def fullest(case: Case, rank: int, sizes: ActivationSizes) -> Counter[str]:
    """The moment when most is needed. Which one that is does not depend on how many microbatches are under way."""
    return max(moments(case, rank, sizes), key=lambda moment: moment.total())


def moments(case: Case, rank: int, sizes: ActivationSizes) -> Iterator[Counter[str]]:
    """What is there beside `memory.state` while the backward pass goes through each module of a rank, and beside the
    activations of all microbatches under way (`count_under_way`), of which the last one's become fewer: below 0.

    Of gradients that are cut, two modules' are whole at a time: those of the module before are still being added, and
    what they come to has memory of its own. In a step of one microbatch the sums of modules to come are not there yet.
    Weights that are cut are whole for the module at hand and those gathered ahead of it.
    """
    for stage in case.stages_of(rank):
        held = _group_by_place(case, rank, stage)
        places = list(held)
        kept = {place: _count_kept(case, place, sizes) for place in places}
        whole = {place: _count_once(case, "whole", place, arrays, _count_whole) for place, arrays in held.items()}
        gathered = {
            place: _count_once(case, "gathered", place, arrays, _count_gathered) for place, arrays in held.items()
        }
        sums = {place: _count_once(case, "sums", place, arrays, _sums) for place, arrays in held.items()}
        waits, freed = head_memory.lasting(case), 0
        before = coming = arriving = 0
        if case.sums_each and case.microbatches == 1:
            coming = sum(sums.values())
        elif case.sums_each:  # those of the microbatch before are still being added
            before, arriving = whole[places[0]], sums[places[0]] if case.microbatches > 2 else 0
        for index in reversed(range(len(places))):
            place = places[index]
            coming = max(0, coming - sums[places[index + 1]]) if index + 1 < len(places) else coming
            weights = sum(gathered[other] for other in _list_in_use(case, places, index))
            inside = place == "head" and (bool(case.head_blocks) or head_memory.reads_the_embedding(case))
            if inside and case.pp == 1:  # what it reads of the embedding
                weights += gathered["embed"]
            summed = head_memory.lookup(case) if place == "embed" else None
            for made in [summed] if summed else _list_moments(case, place, held[place], sizes):
                found = Counter(made)
                found.update(weights=weights, gradients=before - coming, activations=-freed)
                found["buffers"] += arriving + (waits if isinstance(place, int) else 0)
                yield found
            for made in head_memory.moments(case, held[place], sizes, _travels(case)) if inside else ():
                found = Counter(made)
                found.update(weights=weights, gradients=before - coming, activations=-freed, buffers=arriving)
                yield found
            freed, before, arriving = freed + kept[place], whole[place], _arriving(case, sums[place])


def count_under_way(case: Case, rank: int, schedule: Schedule | None, sizes: ActivationSizes) -> int:
    """Bytes of activations that a rank keeps at most, over the order of its schedule."""
    kept = []
    for stage in case.stages_of(rank):
        size = sum(activations.count_block(case, block, sizes) for block in case.stages[stage])
        size += activations.angles(case, sizes, stage)
        if stage == case.last_stage:
            size += activations.head(case, sizes)["activations"]
        kept.append(size)
    if schedule is None:
        return kept[0]
    live = most = 0
    for kind, chunk, _ in schedule.actions[rank]:
        if kind == "F":
            live += kept[chunk]
            most = max(most, live)
        elif kind != "I":
            live -= kept[chunk]
    return most


def _group_by_place(case: Case, rank: int, stage: int) -> dict[Place, list[Array]]:
    """The parameters of each module of a stage, in order; a tied one where its backward pass ends."""
    first, last = stage == 0, stage == case.last_stage
    found: dict[Place, list[Array]] = {"embed": case.list_arrays("embed")} if first else {}
    found |= {block: case.list_arrays(block) for block in case.stages[stage]}
    if last:
        both = 0 in case.stages_of(rank)
        copies = [] if both else [array for array in case.list_arrays("embed") if stage in array.stages]
        found["head"] = [*copies, *case.list_arrays("head")]
    return found


def _count_once(
    case: Case, name: str, place: Place, arrays: list[Array], count: Callable[[Case, list[Array]], int]
) -> int:
    """`count`, once for all blocks of a kind."""
    if not isinstance(place, int):
        return count(case, arrays)
    key = (name, case.kind(place)[0])
    if key not in case.known:
        case.known[key] = count(case, arrays)
    return int(case.known[key])


def _list_moments(case: Case, place: Place, arrays: list[Array], sizes: ActivationSizes) -> list[Counter[str]]:
    """`_iterate_moments`, once for all blocks of a kind."""
    if not isinstance(place, int):
        return list(_iterate_moments(case, place, arrays, sizes))
    key = ("within", sizes.gpu, *case.kind(place))
    if key not in case.known:
        case.known[key] = list(_iterate_moments(case, place, arrays, sizes))
    return list(case.known[key])


def _count_kept(case: Case, place: Place, sizes: ActivationSizes) -> int:
    """Activations that are free once the backward pass is through with a module."""
    if isinstance(place, int):
        return activations.count_block(case, place, sizes)
    return activations.head(case, sizes)["activations"] if place == "head" else 0


def _count_whole(case: Case, arrays: list[Array]) -> int:
    return sum(array.size for array in arrays if memory.cuts_gradients(case, array.group)) * case.bytes.gradient


def _sums(case: Case, arrays: list[Array]) -> int:
    """What sums over ranks that each keep their range come to."""
    cut = (array for array in arrays if case.config.zero and array.group.shards > 1 and array.trained)
    return sum(array.part for array in cut) * case.bytes.gradient


def _arriving(case: Case, sums: int) -> int:
    """Of `_sums` what lies beside those that are kept while it arrives: of the first that is cut nothing."""
    return 0 if case.sums_each and case.microbatches == 1 else sums


def _count_gathered(case: Case, arrays: list[Array]) -> int:
    groups = ((array.size, array.group) for array in arrays)
    return sum(size * memory.weight_bytes(case, group) for size, group in groups if memory.releases(case, group))


def _list_in_use(case: Case, places: list[Place], index: int) -> list[Place]:
    """The modules whose weights are whole in the backward pass of one; a lookup needs none."""
    return [place for place in places[max(0, index - case.config.prefetch) : index + 1] if place != "embed"]


def _iterate_moments(case: Case, place: Place, arrays: list[Array], sizes: ActivationSizes) -> Iterator[Counter[str]]:
    """What comes and goes within a module: the hidden states of all tokens that tp gathers and scatters, what a block
    keeps that is computed again, logits, and the gradients of one module's own matrices before they are added to the
    others. These are in the dtype of the product first and then in that of gradients; where the whole is cut, memory
    for it is asked for when the first of them comes, and the first dtype is gone, but under tp, which adds them itself.
    Logits are gone before either, but for those of a vocabulary cut over tp (`head_memory.logits_left`).
    """
    width = case.bytes
    narrow = width.compute if width.compute != width.gradient else 0
    left = head_memory.logits_left(case) if place == "head" else 0
    made: Counter[str] = Counter()
    first: Counter[str] = Counter()
    for array in arrays:
        if len(array.shape) > 1 and array.trained:
            of = array.name.rsplit(".", len(array.shape) - 1)[0]  # stacks with those beside them
            made[of] += array.size * width.gradient
            by_autograd = case.tp == 1 or len(array.shape) > 2
            if not (by_autograd and memory.cuts_gradients(case, array.group)):
                first[of] = max(first[of], array.size * narrow)
    travels, again = _travels(case, 1 if place == "embed" else 3), 0
    if place == "head":
        yield Counter({"logits": activations.head(case, sizes)["logits"], "buffers": travels})
    elif isinstance(place, int) and case.is_recomputed(place):
        again = activations.count_whole_block(case, place, sizes) - activations.count_block(case, place, sizes)
    gradients = max((made[of] + first[of] for of in made), default=0)
    found = {
        "gradients": _count_whole(case, arrays),
        "logits": left,
        "activations": again,
        "buffers": gradients + travels,
    }
    yield Counter(found)


def _travels(case: Case, terms: int = 3) -> int:
    """Hidden states of all tokens that come and go between ranks of tp: in, its gradient, a term of that; 1: that."""
    return terms * case.tokens * case.width * case.bytes.compute if case.tp > 1 else 0
