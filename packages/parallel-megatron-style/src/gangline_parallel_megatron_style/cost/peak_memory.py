"""Peak memory of a rank: the moments of a backward pass, module by module, and the moment with most memory.

Activations peak at the start of the backward pass. Gradients of the vocabulary matrices are large while no gradients of
blocks are in memory, and the reverse. So only memory that is in use at the same moment is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from gangline_basics.explain.activations import ActivationSizes
from gangline_parallel_megatron_style.cost import activations, head_memory, memory
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.parameters import Array
from gangline_parallel_megatron_style.pipeline.actions import Schedule

Place = int | str  # index of a block, or "embed" or "head"


def count_peak(case: Case, rank: int, schedule: Schedule | None, gpu: bool = True) -> Counter[str]:
    """Return the peak memory, kind -> bytes, of a rank of pipeline rank `rank`."""
    sizes = activations.make_activation_sizes(case, gpu)
    return sum_moment(
        memory.count_state_bytes(case, rank),
        find_fullest_moment(case, rank, sizes),
        count_under_way(case, rank, schedule, sizes),
    )


def sum_moment(state: Counter[str], moment: Counter[str], activation_bytes: int) -> Counter[str]:
    """Return all memory at a moment, kind -> bytes.

    state, moment, activation_bytes: from `memory.count_state_bytes`, `iterate_rank_moments` and `count_under_way`
    """
    moment_bytes = Counter(moment)
    moment_bytes["activations"] += activation_bytes
    return state + moment_bytes


def find_fullest_moment(case: Case, rank: int, sizes: ActivationSizes) -> Counter[str]:
    """Return the moment with most memory, which does not depend on the number of microbatches in flight."""
    return max(iterate_rank_moments(case, rank, sizes), key=lambda moment: moment.total())


def iterate_rank_moments(case: Case, rank: int, sizes: ActivationSizes) -> Iterator[Counter[str]]:
    """Yield the memory, kind -> bytes, while the backward pass goes through each module of a rank.

    The bytes are in addition to `memory.count_state_bytes` and to the activations of all microbatches in flight
    (`count_under_way`). Activations that the backward pass has already freed count as negative bytes.

    Full gradients of two modules exist at a time with sharded gradients: the reduction of the previous module is still
    pending, and its result has separate memory. In a step of one microbatch, the sums of modules that the backward pass
    has not reached are not in memory yet. With sharded weights, the weights of the current module and of the prefetched
    modules are full.
    """
    for stage in case.get_stages(rank):
        module_arrays = _group_by_place(case, rank, stage)
        places = list(module_arrays)
        activation_bytes = {place: _count_saved_bytes(case, place, sizes) for place in places}
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
        elif case.sums_each:  # the reduction of the previous microbatch is pending
            before, arriving = whole[places[0]], sums[places[0]] if case.microbatches > 2 else 0
        for index in reversed(range(len(places))):
            place = places[index]
            coming = max(0, coming - sums[places[index + 1]]) if index + 1 < len(places) else coming
            weights = sum(gathered[other] for other in _list_in_use(case, places, index))
            inside = place == "head" and (bool(case.head_blocks) or head_memory.reads_the_embedding(case))
            if inside and case.pp == 1:  # the head reads the embedding's weights
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
    """Return the peak bytes of the activations of all microbatches in flight on a rank, by its schedule."""
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
    """Return the parameters of each module of a stage, in order.

    A tied parameter is listed at the module whose backward pass runs last.
    """
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
    """Return the result of `count` for a module, cached under `name` for all blocks of a kind."""
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


def _count_saved_bytes(case: Case, place: Place, sizes: ActivationSizes) -> int:
    """Return the bytes of activations that the backward pass of a module frees."""
    if isinstance(place, int):
        return activations.count_block(case, place, sizes)
    return activations.count_head_bytes(case, sizes)["activations"] if place == "head" else 0


def _count_whole(case: Case, arrays: list[Array]) -> int:
    return sum(array.size for array in arrays if memory.cuts_gradients(case, array.group)) * case.bytes.gradient


def _count_sum_bytes(case: Case, arrays: list[Array]) -> int:
    """Return the bytes of gradient sums of arrays that ZeRO shards: each rank keeps the sum of its range."""
    cut = (array for array in arrays if case.config.zero and array.group.shards > 1 and array.trained)
    return sum(array.part for array in cut) * case.bytes.gradient


def _count_arriving_bytes(case: Case, sums: int) -> int:
    """Return the bytes of new gradient sums until they are added to the stored sums; 0 without stored sums."""
    return 0 if case.sums_each and case.microbatches == 1 else sums


def _count_gathered(case: Case, arrays: list[Array]) -> int:
    groups = ((array.size, array.group) for array in arrays)
    return sum(size * memory.count_weight_bytes(case, group) for size, group in groups if memory.releases(case, group))


def _list_in_use(case: Case, places: list[Place], index: int) -> list[Place]:
    """Return the modules, except the embedding, whose weights are full during the backward pass of module `index`."""
    return [place for place in places[max(0, index - case.config.prefetch) : index + 1] if place != "embed"]


def _iterate_moments(case: Case, place: Place, arrays: list[Array], sizes: ActivationSizes) -> Iterator[Counter[str]]:
    """Yield the temporary memory, kind -> bytes, in the backward pass of a module.

    It consists of the hidden states of all tokens that tp gathers and scatters, the recomputed activations of a block,
    logits, and the new gradients of the matrices of one submodule before they are added to the stored gradients. A new
    gradient is first in the matmul's dtype, then in the gradient dtype. If gradients are sharded, the memory of the
    full gradient is allocated at the first new gradient, and the copy in the matmul's dtype is freed, except under tp,
    which adds gradients itself. Logits are freed earlier, except with a vocabulary sharded over tp
    (`head_memory.count_logits_bytes`).
    """
    width = case.bytes
    narrow = width.compute if width.compute != width.gradient else 0
    logits_bytes = head_memory.count_logits_bytes(case) if place == "head" else 0
    gradient_bytes: Counter[str] = Counter()
    first: Counter[str] = Counter()
    for array in arrays:
        if len(array.shape) > 1 and array.trained:
            of = array.name.rsplit(".", len(array.shape) - 1)[0]  # stacked expert weights of one module
            gradient_bytes[of] += array.size * width.gradient
            by_autograd = case.tp == 1 or len(array.shape) > 2
            if not (by_autograd and memory.cuts_gradients(case, array.group)):
                first[of] = max(first[of], array.size * narrow)
    travels, recomputed_bytes = _count_hidden_bytes(case, 1 if place == "embed" else 3), 0
    if place == "head":
        yield Counter({"logits": activations.count_head_bytes(case, sizes)["logits"], "buffers": travels})
    elif isinstance(place, int) and case.is_recomputed(place):
        recomputed_bytes = activations.count_whole_block(case, place, sizes) - activations.count_block(
            case, place, sizes
        )
    gradients = max((gradient_bytes[of] + first[of] for of in gradient_bytes), default=0)
    moment = {
        "gradients": _count_whole(case, arrays),
        "logits": logits_bytes,
        "activations": recomputed_bytes,
        "buffers": gradients + travels,
    }
    yield Counter(moment)


def _count_hidden_bytes(case: Case, terms: int = 3) -> int:
    """Return the bytes of hidden states of all tokens in a backward pass under tp; 0 without tp.

    terms: number of hidden states: 3 for the input, its gradient and one matmul's term of the gradient; 1 for the term
    """
    return terms * case.tokens * case.width * case.bytes.compute if case.tp > 1 else 0
