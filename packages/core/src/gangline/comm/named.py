"""Process groups named by their ranks, so that ranks may request them in any order.

torch names a group by its ranks and by the number of groups that the process made before; its members find each
other by that name. Members that made different groups before would wait under different names for ever. gloo also
connects all members while the group is made, so that ranks that request groups in a circle (0 for {0, 1}, 1 for
{1, 2}, 2 for {0, 2} first) wait for each other. Here the name of a group follows from its ranks alone, and gloo
connects two members when they first exchange data.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import ProcessGroup, distributed_c10d


def make_group(ranks: Sequence[int], timeout: timedelta | None, description: str) -> ProcessGroup:
    """Return the group of these global ranks, in this order; make it if this process has no group of that name yet.

    Called by members only, without waiting for other members. timeout: None for torch's default. description: for
    torch's own logs. `torch.distributed.new_group` takes no name, so this calls the functions that it is made of.
    """
    name = name_of(ranks)
    world = distributed_c10d._world
    for group, other in world.pg_names.items():
        if other == name:
            return group
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # gloo reads it whenever a group is made
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
    """Return the name of a group, short for any number of ranks: 16,384 ranks are named in 40 letters."""
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()
    return f"gangline-{digest[:31]}"
