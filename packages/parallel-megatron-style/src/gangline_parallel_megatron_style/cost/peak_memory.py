"""Peak memory of a rank: the moments of a backward pass, module by module, and the fullest of these moments.

Activations peak at the start of the backward pass. Gradients of the vocabulary's matrices are large while there are
none of a block, and the reverse. So only memory that is in use at one moment is added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from gangline_basics.explain.activations import ActivationSizes
from gangline_parallel_megatron_style.cost import activations, head_memory, memory
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.parameters import Array
from gangline_parallel_megatron_style.pipeline.actions import Schedule

Place = int | str  # number of a block, or "embed" or "head"


def count_peak(case: Case, rank: int, schedule: Schedule | None, gpu: bool = True) -> Counter[str]:
    """Return kind -> bytes for a rank of pipeline rank `rank`, at its fullest moment."""
    sizes = activations.make_activation_sizes(case, gpu)
    return sum_moment(
        memory.count_state_bytes(case, rank),
        find_fullest_moment(case, rank, sizes),
        count_under_way(case, rank, schedule, sizes),
    )


def sum_moment(state: Counter[str], moment: Counter[str], activation_bytes: int) -> Counter[str]:
    """Return the sum of all bytes at a moment, by kind.

    state, moment, activation_bytes: from `memory.count_state_bytes`, `iterate_rank_moments` and `count_under_way`
    """
    moment_bytes = Counter(moment)
    moment_bytes["activations"] += activation_bytes
    return state + moment_bytes


def find_fullest_moment(case: Case, rank: int, sizes: ActivationSizes) -> Counter[str]:
    """Return the fullest moment. Which moment it is does not depend on the number of microbatches under way."""
    return max(iterate_rank_moments(case, rank, sizes), key=lambda moment: moment.total())


def iterate_rank_moments(case: Case, rank: int, sizes: ActivationSizes) -> Iterator[Counter[str]]:
    """Yield the bytes by kind while the backward pass goes through each module of a rank.

    They come on top of `memory.count_state_bytes`, and of the activations of all microbatches under way
    (`count_under_way`). The last microbatch's activations are freed on the way, so they are counted below 0.

    Sharded gradients are full for two modules at a time: those of the previous module are still being reduced, and the
    result has memory of its own. In a step of one microbatch the sums of later modules are not there yet. Sharded
    weights are full for the current module and those gathered ahead of it.
    """
    for stage in case.get_stages(rank):
        module_arrays = _group_by_place(case, rank, stage)
        places = list(module_arrays)
        activation_bytes = {place: _count_kept(case, place, sizes) for place in places}
        whole = {
            place: _count_once(case, "whole", place, arrays, _count_whole) for place, arrays in module_arrays.items()
        }
        gathered = {
            place: _count_once(case, "gathered", place, arrays, _count_gathered)
            for place, arrays in module_arrays.items()
        }
        sums = {
            place: _count_once(case, "sums", place, arrays, _count_sum_bytes) for place, arrays in module_arrays.items()
        }
        waits, freed = head_memory.count_waiting_gradient(case), 0
        before = coming = arriving = 0
        if case.sums_each and case.microbatches == 1:
            coming = sum(sums.values())
        elif case.sums_each:  # the previous microbatch's gradients are still being reduced
            before, arriving = whole[places[0]], sums[places[0]] if case.microbatches > 2 else 0
        for index in reversed(range(len(places))):
            place = places[index]
            coming = max(0, coming - sums[places[index + 1]]) if index + 1 < len(places) else coming
            weights = sum(gathered[other] for other in _list_in_use(case, places, index))
            inside = place == "head" and (bool(case.head_blocks) or head_memory.reads_the_embedding(case))
            if inside and case.pp == 1:  # reads the embedding
                weights += gathered["embed"]
            summed = head_memory.find_lookup_moment(case) if place == "embed" else None
            for module_moment in [summed] if summed else _list_moments(case, place, module_arrays[place], sizes):
                moment = Counter(module_moment)
                moment.update(weights=weights, gradients=before - coming, activations=-freed)
                moment["buffers"] += arriving + (waits if isinstance(place, int) else 0)
                yield moment
            for module_moment in (
                head_memory.iterate_head_moments(case, module_arrays[place], sizes, _count_hidden_bytes(case))
                if inside
                else ()
            ):
                moment = Counter(module_moment)
                moment.update(weights=weights, gradients=before - coming, activations=-freed, buffers=arriving)
                yield moment
            freed, before, arriving = (
                freed + activation_bytes[place],
                whole[place],
                _count_arriving_bytes(case, sums[place]),
            )


def count_under_way(case: Case, rank: int, schedule: Schedule | None, sizes: ActivationSizes) -> int:
    """Return the maximum bytes of activations that a rank keeps, over the order of its schedule."""
    chunk_bytes = []
    for stage in case.get_stages(rank):
        size = sum(activations.count_block(case, block, sizes) for block in case.stages[stage])
        size += activations.count_angle_bytes(case, sizes, stage)
        if stage == case.last_stage:
            size += activations.count_head_bytes(case, sizes)["activations"]
        chunk_bytes.append(size)
    if schedule is None:
        return chunk_bytes[0]
    live = most = 0
    for kind, chunk, _ in schedule.actions[rank]:
        if kind == "F":
            live += chunk_bytes[chunk]
            most = max(most, live)
        elif kind != "I":
            live -= chunk_bytes[chunk]
    return most


def _group_by_place(case: Case, rank: int, stage: int) -> dict[Place, list[Array]]:
    """Return the parameters of each module of a stage, in order; a tied one where its backward pass ends."""
    first, last = stage == 0, stage == case.last_stage
    module_arrays: dict[Place, list[Array]] = {"embed": case.list_arrays("embed")} if first else {}
    module_arrays |= {block: case.list_arrays(block) for block in case.stages[stage]}
    if last:
        both = 0 in case.get_stages(rank)
        copies = [] if both else [array for array in case.list_arrays("embed") if stage in array.stages]
        module_arrays["head"] = [*copies, *case.list_arrays("head")]
    return module_arrays


def _count_once(
    case: Case, name: str, place: Place, arrays: list[Array], count: Callable[[Case, list[Array]], int]
) -> int:
    """Return the result of `count`, cached for all blocks of a kind."""
    if not isinstance(place, int):
        return count(case, arrays)
    key = (name, case.get_kind(place)[0])
    if key not in case.known:
        case.known[key] = count(case, arrays)
    return int(case.known[key])


def _list_moments(case: Case, place: Place, arrays: list[Array], sizes: ActivationSizes) -> list[Counter[str]]:
    """Return the moments of `_iterate_moments`, cached for all blocks of a kind."""
    if not isinstance(place, int):
        return list(_iterate_moments(case, place, arrays, sizes))
    key = ("within", sizes.gpu, *case.get_kind(place))
    if key not in case.known:
        case.known[key] = list(_iterate_moments(case, place, arrays, sizes))
    return list(case.known[key])


def _count_kept(case: Case, place: Place, sizes: ActivationSizes) -> int:
    """Return the bytes of activations that are freed after the backward pass of a module."""
    if isinstance(place, int):
        return activations.count_block(case, place, sizes)
    return activations.count_head_bytes(case, sizes)["activations"] if place == "head" else 0


def _count_whole(case: Case, arrays: list[Array]) -> int:
    return sum(array.size for array in arrays if memory.cuts_gradients(case, array.group)) * case.bytes.gradient


def _count_sum_bytes(case: Case, arrays: list[Array]) -> int:
    """Return the bytes of the sums over ranks of which each rank keeps its range."""
    cut = (array for array in arrays if case.config.zero and array.group.shards > 1 and array.trained)
    return sum(array.part for array in cut) * case.bytes.gradient


def _count_arriving_bytes(case: Case, sums: int) -> int:
    """Return the bytes that arriving sums need next to the stored ones; 0 if the only microbatch is reduced at once."""
    return 0 if case.sums_each and case.microbatches == 1 else sums


def _count_gathered(case: Case, arrays: list[Array]) -> int:
    groups = ((array.size, array.group) for array in arrays)
    return sum(size * memory.count_weight_bytes(case, group) for size, group in groups if memory.releases(case, group))


def _list_in_use(case: Case, places: list[Place], index: int) -> list[Place]:
    """Return the modules whose weights are full during the backward pass of one module; a lookup needs none."""
    return [place for place in places[max(0, index - case.config.prefetch) : index + 1] if place != "embed"]


def _iterate_moments(case: Case, place: Place, arrays: list[Array], sizes: ActivationSizes) -> Iterator[Counter[str]]:
    """Yield the bytes by kind that are temporary within a module.

    These are the hidden states of all tokens that tp gathers and scatters, the recomputed activations of a block,
    logits, and the gradients of one module's own matrices before they are added to the others. These gradients are in
    the matmul's dtype first and then in that of gradients. If the full gradient is sharded, its memory is allocated
    when its first gradient comes, and the first dtype is freed, except under tp, which adds them itself. Logits are
    freed earlier, except those of a vocabulary sharded over tp (`head_memory.count_kept_logits`).
    """
    width = case.bytes
    narrow = width.compute if width.compute != width.gradient else 0
    kept_logits = head_memory.count_kept_logits(case) if place == "head" else 0
    gradient_bytes: Counter[str] = Counter()
    first: Counter[str] = Counter()
    for array in arrays:
        if len(array.shape) > 1 and array.trained:
            of = array.name.rsplit(".", len(array.shape) - 1)[0]  # groups a stack with the other stacks of its module
            gradient_bytes[of] += array.size * width.gradient
            by_autograd = case.tp == 1 or len(array.shape) > 2
            if not (by_autograd and memory.cuts_gradients(case, array.group)):
                first[of] = max(first[of], array.size * narrow)
    travels, again = _count_hidden_bytes(case, 1 if place == "embed" else 3), 0
    if place == "head":
        yield Counter({"logits": activations.count_head_bytes(case, sizes)["logits"], "buffers": travels})
    elif isinstance(place, int) and case.is_recomputed(place):
        again = activations.count_whole_block(case, place, sizes) - activations.count_block(case, place, sizes)
    gradients = max((gradient_bytes[of] + first[of] for of in gradient_bytes), default=0)
    moment = {
        "gradients": _count_whole(case, arrays),
        "logits": kept_logits,
        "activations": again,
        "buffers": gradients + travels,
    }
    yield Counter(moment)


def _count_hidden_bytes(case: Case, terms: int = 3) -> int:
    """Return bytes of hidden states of all tokens under tp. terms: 3 input, gradient and a term of it; 1 the term."""
    return terms * case.tokens * case.width * case.bytes.compute if case.tp > 1 else 0
