"""State memory of a rank throughout a step, kind -> bytes: weights, gradients, optimizer state.

Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3. Temporary memory is in `peak_memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gangline.shard import get_itemsize
from gangline_basics.parallel.owners import count_most_matrix_bytes
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.parameters import Array, ParamGroup

REDUCTION_STATE = "gradient reduction state"  # arrays that a gradient reduction keeps, such as error feedback


def count_state_bytes(case: Case, rank: int) -> Counter[str]:
    """Return a rank's bytes of weights, gradients, master weights and optimizer state throughout a step.

    ZeRO stage 0 shards no state over the shard ranks; 1 shards master weights and optimizer state; 2 also gradients
    (except with run.deterministic, whose sums need all gradients); 3 also weights, which are full only temporarily
    (`peak_memory`). If each shard of a fold is on one rank, ZeRO does not shard the fold's arrays. Frozen arrays have
    only weights. With offload, master weights, optimizer state and callbacks' copies are in host memory. If the forward
    pass computes in the dtype of the master weights, full weights are the master weights. The copy of a tied parameter
    has no optimizer state.
    """
    state_bytes: Counter[str] = Counter()
    own_stages = set(case.get_stages(rank))
    ends = [
        array
        for place in ("embed", "head")
        for array in case.list_arrays(place)
        if not own_stages.isdisjoint(array.stages)
    ]
    for array in ends:
        state_bytes.update(_count_state(case, [array], updated=array.stages[0] in own_stages))
    for block in case.list_blocks(rank):
        key = ("state", case.get_kind(block)[0])
        if key not in case.known:
            case.known[key] = _count_state(case, case.list_arrays(block))
        state_bytes.update(case.known[key])
    if not case.config.offload:
        state_bytes["optimizer state"] += _count_matrices(case, rank)
    if reduction_numbers := sum(
        count_reduction_state(case, group, size)
        for group, size in count_group_numbers(case, rank).items()
        if group.kind.trained
    ):
        state_bytes[REDUCTION_STATE] = reduction_numbers * case.bytes.wire
    return state_bytes


def _count_matrices(case: Case, rank: int) -> int:
    """Return the bytes of full matrices in the optimizer (Muon): maximum over the ranks with pipeline rank `rank`."""
    if not case.optimizer.maps_matrices():
        return 0
    key = ("matrices", rank)
    if key not in case.known:
        names = [array.name for array in case.list_held(rank) if array.matrix and array.trained]
        ranks = case.mesh.group(case.mesh.rank({"pp": rank}), tuple(axis for axis in case.mesh.axes if axis != "pp"))
        case.known[key] = count_most_matrix_bytes(case.optimizer, case.registry, names, ranks, case.bytes.master)
    matrix_bytes: int = case.known[key]
    return matrix_bytes


def _count_state(case: Case, arrays: Iterable[Array], updated: bool = True) -> Counter[str]:
    """Return the state of arrays, kind -> bytes. `updated`: whether the optimizer updates the arrays on this rank."""
    width, host = case.bytes, case.config.offload
    state_bytes: Counter[str] = Counter()
    for array in arrays:
        part, weights, masters = (
            count_state_numbers(case, array),
            count_weight_bytes(case, array.group),
            count_stored_bytes(case, array.group),
        )
        if not releases(case, array.group):
            state_bytes["weights"] += array.size * weights
        if not host and (weights != masters or releases(case, array.group)):
            state_bytes["master weights"] += part * masters
        if not array.trained:
            continue
        state_bytes["gradients"] += (part if cuts_gradients(case, array.group) else array.size) * width.gradient
        if host or not updated:
            continue
        box = array.part_shape if case.config.zero else array.own
        state_bytes["optimizer state"] += case.optimizer.state_bytes(
            array.shape, box, matrix=array.matrix, master=width.master
        )
        state_bytes["callbacks"] += part * case.callback_copies * max(width.master, 4)
    return state_bytes


def count_reduction_state(case: Case, group: ParamGroup, numbers: int) -> int:
    """Return the number of elements that the gradient reduction keeps on a rank for a group of `numbers` parameters."""
    if group.copies > 1:
        return case.gradients.count_state(numbers // group.shards, group.copies, scatters=False)
    if group.shards == 1:
        return 0
    return case.gradients.count_state(numbers, group.shards, scatters=case.config.zero > 0)


def count_state_numbers(case: Case, array: Array) -> int:
    """Return the number of elements of a parameter whose optimizer state is on one rank."""
    return array.part if case.config.zero else array.size


def count_weight_bytes(case: Case, group: ParamGroup) -> int:
    """Return the bytes per element of the weights of a group in the forward pass."""
    return count_stored_bytes(case, group) if group.kind.master_dtype else case.bytes.compute


def count_stored_bytes(case: Case, group: ParamGroup) -> int:
    """Return the stored bytes per element of a group: in the dtype of master weights, or in a frozen low-bit dtype."""
    return case.bytes.master if group.kind.low_bit is None else get_itemsize(group.kind.low_bit)


def releases(case: Case, group: ParamGroup) -> bool:
    """Return whether a group's full weights are in memory only while its module is in use (ZeRO stage 3)."""
    return case.config.zero == 3 and group.shards > 1


def cuts_gradients(case: Case, group: ParamGroup) -> bool:
    """Return whether a group's full gradients are in memory only during its module's backward pass (ZeRO stage 2)."""
    return case.sums_each and group.shards > 1 and group.kind.trained


def count_group_numbers(case: Case, rank: int) -> Counter[ParamGroup]:
    """Return the number of elements of each parameter group on a rank with pipeline index `rank`, in model order."""
    numbers: Counter[ParamGroup] = Counter()
    for array in case.list_held(rank):
        numbers[array.group] += array.size
    return numbers
