"""Notices about layouts that work but are a poor choice. A notice does not stop a run."""

from __future__ import annotations

from gangline_basics.model.seams import get_calls
from gangline_parallel_megatron_style.cost import timing
from gangline_parallel_megatron_style.cost.case import Case


def find_notices(case: Case) -> list[str]:
    """Return the notices about the layout of a case, one or two sentences each."""
    return [
        *_find_pipeline_notices(case),
        *_find_data_notices(case),
        *_find_node_notices(case),
        *_find_attention_notices(case),
    ]


def _find_pipeline_notices(case: Case) -> list[str]:
    if case.pp == 1 or case.microbatches >= case.pp:
        return []
    waits = timing.compute_bubble(case, timing.find_schedule(case))
    few = f"{case.microbatches} microbatch{'es' * (case.microbatches > 1)} for a pipeline of {case.pp} ranks"
    return [
        f"{few}: the ranks wait {waits:.0%} of the time. A smaller batch.micro_size or fewer data-parallel ranks give "
        f"more microbatches; use about {4 * case.pp} microbatches."
    ]


def _find_data_notices(case: Case) -> list[str]:
    if case.config.zero == 3 and case.shards == 1:
        return ["parallel.zero=3 has no effect: it shards the weights over dp_shard and cp, which have one rank."]
    if case.config.zero == 3 and case.pp > 1:
        return [
            f"parallel.zero=3 in a pipeline gathers every block for the forward and the backward pass of each of "
            f"{case.microbatches} microbatches. parallel.zero=1 sends less and needs more memory."
        ]
    return []


def _find_node_notices(case: Case) -> list[str]:
    network, node = case.config.topology, case.config.topology.gpus_per_node
    if case.tp <= node and network.find_tier(case.mesh, "tp") in ("rack", "cluster", "fibre"):
        return [f"parallel.tp={case.tp} does not divide the {node} GPUs of a node: some tp groups span two nodes."]
    return []


def _find_attention_notices(case: Case) -> list[str]:
    """Return a notice if tp shards undeclared attention, which might use parameters of the wrong heads on a rank."""
    silent = [path for path, call in get_calls(case.tree, case.plan, "attention").items() if call is None]
    if case.tp == 1 or not silent:
        return []
    more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    return [
        f"{silent[0]}{more}: the node does not declare its attention (`get_seams`). parallel.tp={case.tp} passes some "
        "of the heads to the attention, which is correct only if all heads are computed alike."
    ]
