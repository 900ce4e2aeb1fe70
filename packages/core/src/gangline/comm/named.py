"""Process groups named by their ranks, so that ranks may request them in any order.

torch names a group by its ranks and by the number of groups that the process created before, and the ranks of a group
find each other by this name. Ranks that had created different groups before would wait for ever, under different names.
gloo also connects all ranks of a group while it creates the group, so ranks that request groups in a cycle (rank 0
first {0, 1}, rank 1 {1, 2}, rank 2 {0, 2}) deadlock. Here the name of a group depends only on its ranks, and gloo
connects two ranks when they first exchange data.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import ProcessGroup, distributed_c10d


def make_group(ranks: Sequence[int], timeout: timedelta | None, description: str) -> ProcessGroup:
    """Return the group of these global ranks, in this order; create it if this process does not have it yet.

    Called only on these ranks; does not wait for other ranks. timeout: of each collective; None: torch's default.
    description: text for torch's logs. `torch.distributed.new_group` takes no name, so call its inner functions.
    """
    name = name_of(ranks)
    world = distributed_c10d._world
    for group, other in world.pg_names.items():
        if other == name:
            return group
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # gloo reads the variable when it creates a group
    default = distributed_c10d._get_default_group()
    backend, store = world.pg_map[default]
    new_group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(default.rank()),
        list(ranks),
        distributed_c10d.Backend(backend),
        store,
        name,  # type: ignore[arg-type]  # a NewType of str in torch 2.13
        timeout=timeout or distributed_c10d._get_default_timeout(distributed_c10d.Backend(backend)),
        device_id=default.bound_device_id,
        group_desc=description,
    )
    world.pg_group_ranks[new_group] = {rank: index for index, rank in enumerate(ranks)}
    return new_group


def name_of(ranks: Sequence[int]) -> str:
    """Return the name of a group, 40 characters for any number of ranks."""
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()
    return f"gangline-{digest[:31]}"
