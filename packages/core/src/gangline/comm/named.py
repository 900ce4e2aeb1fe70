"""Process groups under names of our own, so that ranks may ask for them in any order.

torch names a group by its ranks and by how many groups the process has made before; under that name its members find
each other. Members that have made different groups before would wait under different names for ever. gloo, besides,
connects all members while the group is made, so that ranks that ask in a circle (0 for {0, 1}, 1 for {1, 2}, 2 for
{0, 2} first) wait for each other. Here a group has its name from its ranks alone, and gloo connects two of them when
they first exchange something.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import ProcessGroup, distributed_c10d


def make_group(ranks: Sequence[int], timeout: timedelta | None, description: str) -> ProcessGroup:
    """The group of these global ranks, its ranks in this order; made where this process has none of that name yet.

    Called by members alone, and waits for none of them. timeout: None for torch's default. description: for torch's own
    logs. `torch.distributed.new_group` takes no name, hence the calls of what it is made of.
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
    """Short however many there are: 16,384 ranks are named in 40 letters."""
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()
    return f"gangline-{digest[:31]}"
