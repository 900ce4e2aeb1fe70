"""Cost of strategies that replicate the model on every rank: `single`, and `ddp` with its all-reduce of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, prod
from typing import TYPE_CHECKING

from gangline.config.sections import Recompute
from gangline.explain.explained import Explained, RankExplained, StepAction, Transfer
from gangline.explain.topology import Topology
from gangline.explain.work import StageWork
from gangline.mesh import DATA_AXES, Mesh
from gangline.model.compose import compose_model
from gangline.model.flops import count_flops_per_token, count_parameters
from gangline.model.local_sizes import LocalSizes
from gangline.model.matmuls import AttentionMatmuls
from gangline.model.tree import Node, get_parameter_shapes, map_paths
from gangline.plan import Plan, is_mapped, parse_block_number
from gangline.shard import Layout, Registry, name_model_array
from gangline_basics.explain.activations import ActivationSizes, count_head, count_node, count_recomputed_attention
from gangline_basics.explain.work import count_work
from gangline_basics.launch.memory import count_weight_bytes
from gangline_basics.parallel.owners import count_most_matrix_bytes

if TYPE_CHECKING:
    from gangline.config.schema import Run


def explain_replicated(
    run: Run,
    mesh: Mesh,
    model: tuple[Node, Plan] | None = None,
    topology: Topology | None = None,
    bucket: int | None = None,
) -> Explained:
    """Return memory, transfers and work of a run that replicates the model on every rank.

    bucket: bytes of gradients per all-reduce; None: no gradients are sent.
    """
    tree, plan = model or compose_model(run)
    topology = topology or Topology()
    nodes, width = map_paths(tree), run.precision.get_sizes()
    share = run.batch.global_size // mesh.size(*DATA_AXES)
    micro = run.batch.micro_size or share // run.parallel.count_microbatches(share, mesh)
    tokens, microbatches = micro * run.batch.sequence_length, share // micro
    local = LocalSizes(
        tokens=tokens, inner_tokens=tokens, itemsize=width.compute, master_itemsize=width.master, ranks={}
    )
    sizes = ActivationSizes(local=local, gpu=run.job.device != "cpu", plan=plan)
    parts, activation_bytes, recomputed_bytes = list[StageWork](), 0, 0
    counts: dict[tuple[Node, bool, bool], tuple[StageWork, int, int]] = {}
    for index, path in enumerate([plan.embed, *(f"{plan.blocks}.{block}" for block in range(plan.layers)), plan.head]):
        block, first = 1 <= index <= plan.layers, index == 1
        recomputed = block and run.job.recompute is not Recompute.none and (index - 1) % run.job.recompute_every == 0
        key = (nodes[path], recomputed, plan.is_frozen(f"{path}.weight"))
        if key not in counts or first:
            counts[key] = _count_part(run, nodes[path], path, plan, sizes, recomputed)
        work, stays, more = counts[key]
        parts.append(work)
        activation_bytes, recomputed_bytes = activation_bytes + stays, max(recomputed_bytes, more)
    in_head = dict[str, int]()
    for path in plan.list_blocks_in_head(nodes):
        recomputed = run.job.recompute is not Recompute.none and parse_block_number(path) % run.job.recompute_every == 0
        work, in_head[path], more = _count_part(run, nodes[path], path, plan, sizes, recomputed)
        parts[-1], recomputed_bytes = parts[-1].add_recomputed(work), max(recomputed_bytes, more)
    total, shapes = StageWork.add_up(parts), get_parameter_shapes(tree)
    matrix = {name: name.startswith(f"{plan.blocks}.") and is_mapped(name, shape) for name, shape in shapes.items()}
    trained_sizes = {name: prod(shape) for name, shape in shapes.items() if not plan.is_frozen(name)}
    numbers, kept_bytes = count_parameters(tree), Counter[str]()
    for name, shape in shapes.items():
        compute_bytes, beside = count_weight_bytes(plan, name, width)
        kept_bytes.update({"weights": prod(shape) * compute_bytes, "master weights": prod(shape) * beside})
    states = sum(
        run.optimizer.state_bytes(shapes[name], shapes[name], matrix=matrix[name], master=width.master)
        for name in trained_sizes
    )
    states += _count_matrices(run, mesh, {name: shapes[name] for name in trained_sizes if matrix[name]})
    end = count_head(plan, plan.facts.get("dim", 0), sizes, nodes[plan.head], in_head)
    rank_bytes = Counter(
        {
            "weights": kept_bytes["weights"],
            "master weights": kept_bytes["master weights"],
            "gradients": sum(trained_sizes.values()) * width.gradient,
            "optimizer state": states,
            "callbacks": sum(one.count_copies(run) for one in run.callback.values())
            * sum(trained_sizes.values())
            * width.master,
            "activations": activation_bytes + end["activations"] + recomputed_bytes,
            "logits": end["logits"],
        }
    )
    turns = tuple((StepAction(kind, 0, microbatch),) for microbatch in range(microbatches) for kind in ("F", "B"))
    gradients, ranks = sum(trained_sizes.values()), mesh.size(*DATA_AXES)
    calls = ceil(gradients * width.wire / bucket) if bucket and ranks > 1 else 0
    nbytes = int(run.gradients.count_sent(gradients, ranks, False, width.wire)) if ranks > 1 else 0
    transfers = _list_gradients(mesh, topology, nbytes, calls)
    if calls and (state_numbers := run.gradients.count_state(gradients, ranks, scatters=False)):
        rank_bytes["gradient reduction state"] = state_numbers * width.wire
    rank = RankExplained(
        bytes=rank_bytes,
        transfers=transfers,
        stages=(0,),
        blocks=plan.layers,
        parameters=numbers,
        updated=sum(trained_sizes.values()),
        flops=_step_flops(total) * microbatches,
        turns=turns,
    )
    return Explained(
        mesh=mesh,
        topology=topology,
        ranks=(rank,),
        work=(total,),
        microbatches=microbatches,
        tokens=run.batch.global_size * run.batch.sequence_length,
        state_bytes=width.gradient
        + int(2 * (1 + run.optimizer.count_states(matrix=True)) * width.master)
        + width.compute,
        token_flops=count_flops_per_token(tree, run.batch.sequence_length, plan),
        parameters=numbers,
        matmul_format=run.precision.get_matmul_format(),
    )


def _count_matrices(run: Run, mesh: Mesh, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bytes of optimizer state for complete matrices, on the rank with the most bytes."""
    if not run.optimizer.maps_matrices():
        return 0
    registry = Registry.of(mesh, {name_model_array(name): Layout(shape) for name, shape in shapes.items()})
    ranks = mesh.group(0, DATA_AXES)
    return count_most_matrix_bytes(run.optimizer, registry, list(shapes), ranks, run.precision.get_sizes().master)


def _count_part(
    run: Run, node: Node, path: str, plan: Plan, sizes: ActivationSizes, recomputed: bool
) -> tuple[StageWork, int, int]:
    """Return (work, bytes saved for the backward pass, bytes recomputed in the backward pass) of a node."""
    node_bytes = count_node(node, sizes, path)
    work = replace(
        count_work(node, path, plan, sizes.local, sequence_length=run.batch.sequence_length), saved_bytes=node_bytes
    )
    if path in (plan.embed, plan.head):
        return work, 0, 0
    if not recomputed:
        return work, node_bytes, 0
    if run.job.recompute is Recompute.full:
        stays = min(node_bytes, sizes.tokens * plan.facts.get("dim", 0) * sizes.itemsize)
        return work.apply_recompute(), stays, node_bytes - stays
    saving = count_recomputed_attention(node, sizes)
    return work.apply_recompute(attention_only=True), node_bytes - saving, saving


def _step_flops(work: StageWork) -> int:
    """Return the FLOPs of a microbatch: forward pass, gradients of inputs and weights, and recomputation."""
    weights = sum(matmul.flops * times for matmul, times in work.weights.items())
    recomputed = sum(matmul.flops * times for matmul, times in work.recompute.items())
    attention = sum(p.flops * times for p, times in work.forward.items() if isinstance(p, AttentionMatmuls))
    return 2 * work.flops + weights + attention + recomputed


def _list_gradients(mesh: Mesh, topology: Topology, nbytes: int, calls: int) -> tuple[Transfer, ...]:
    axes = tuple(axis for axis in DATA_AXES if mesh.size(axis) > 1)
    ranks = mesh.size(*axes)
    if not calls:
        return ()
    return (
        Transfer(
            axes=axes,
            purpose="gradients",
            operation="all_reduce",
            ranks=ranks,
            each_node=min(ranks, topology.gpus_per_node),
            each_rack=min(ranks, topology.domains[1][1]),
            each_datacentre=min(ranks, topology.domains[2][1]),
            tier=topology.find_tier(mesh, *axes),
            calls=calls,
            bytes=nbytes,
            when="end",
            waits=False,
        ),
    )
