"""Checks that a model fits a mesh: heads and features over tp, tokens over cp and tp, blocks over pp, folds.

Sizes come from the plan and from the shapes that the nodes of the model tree declare. `plan.facts` names the sizes; a
model without facts is checked by its shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd, lcm
from typing import TYPE_CHECKING

from gangline import Problem
from gangline.config import find_divisors
from gangline.mesh import Mesh
from gangline.model.calls import AttentionCall
from gangline.model.tree import Node, get_parameter_shapes
from gangline.plan import Fold, Plan, matches
from gangline_basics.advice import suggest_nearest as nearest_accepted
from gangline_basics.model.seams import get_calls
from gangline_parallel_megatron_style.context.supported import explain_unsupported
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES
from gangline_parallel_megatron_style.sharding.cuts import cut_array

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_parallel_megatron_style.config import AxesConfig


def find_problems(config: AxesConfig, run: Run, mesh: Mesh, tree: Node, plan: Plan) -> Iterator[Problem]:
    """Yield every problem between the model and the mesh, each with the nearest option values that fit."""
    shapes = get_parameter_shapes(tree)
    yield from _find_unmatched(plan, shapes)
    if mesh.size("tp") > 1:
        yield from find_tensor_problems(config, run, mesh, plan, shapes)
        yield from find_loss_problems(mesh, tree, plan)
    if mesh.size("cp") > 1:
        yield from find_context_problems(config, run, mesh, plan)
        yield from find_attention_problems(config, mesh, tree, plan)
    yield from find_sequence_problems(config, run.batch.sequence_length, mesh)
    if mesh.size("pp") > 1 or config.stages is not None:
        yield from find_pipeline_problems(config, run, mesh, plan)
    for fold in plan.folds:
        yield from find_fold_problems(config, mesh, fold)
    yield from find_row_block_problems(run, mesh, plan, shapes)


def _find_unmatched(plan: Plan, shapes: Mapping[str, object]) -> Iterator[Problem]:
    names = [*shapes, *(alias for alias, _ in plan.tied)]
    for rule in plan.sharding:
        if not any(matches(rule.pattern, name) for name in names):
            yield Problem(
                f"the plan of this model shards {rule.pattern}, which matches no parameter of the model.",
                "The parameter that the shard rule was meant for would not be sharded.",
                "Correct the pattern in the model's plan, or in the edit that added the rule.",
            )


# --- tensor parallelism ----------------------------------------------------------------------------------------------


def find_tensor_problems(
    config: AxesConfig, run: Run, mesh: Mesh, plan: Plan, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Problem]:
    """Yield problems of tp: larger than a node, no shard rules, units that tp does not divide, or no loss seam."""
    tp, node = mesh.size("tp"), config.topology.gpus_per_node
    if tp > node and not config.force:
        yield Problem(
            f"parallel.tp={tp} is larger than a node, which has {node} GPUs.",
            "Every block waits for four collectives of tensor parallelism, which are many times slower between nodes.",
            nearest_accepted(
                run,
                [
                    *({"parallel.tp": size} for size in find_divisors(tp)[::-1] if size <= node),
                    {"parallel.force": True},
                    {"parallel.topology.gpus_per_node": tp},
                ],
                most=5,
            ),
        )
    if not any(rule.axis == "tp" for rule in plan.sharding):
        yield Problem(
            f"parallel.tp={tp}: the plan of this model has no shard rule for tensor parallelism.",
            'Tensor parallelism needs rules such as ShardRule.colwise("blocks.*.feed_forward.w_up").',
            "Add shard rules to the model's plan, or use parallel.tp=1.",
        )
        return
    units = _count_units(plan, shapes)
    wrong = {name: count for name, count in units.items() if not _divides(name, count, tp)}
    if wrong:
        fitting = [
            size
            for size in range(1, min(max(node, tp), max(units.values())) + 1)
            if all(_divides(name, count, size) for name, count in units.items())
        ]
        sizes = ", ".join(f"{_name_option(name)}={count}" for name, count in wrong.items())
        why = (
            "Each tensor-parallel rank has the same number of heads and features (a key head may serve several ranks)."
        )
        rounded = [group for group, edit in run.edits.items() if getattr(edit, "base", None) == "8bit"]
        if any(name.endswith(".scales") for name in wrong):
            why = "8-bit weights (8bit) have one scale per block of features, and each rank must hold complete blocks."
        yield Problem(
            f"parallel.tp={tp} does not divide {sizes}.",
            why,
            nearest_accepted(
                run,
                [
                    *({f"{group}.base": "bf16"} for group in rounded),
                    *({"parallel.tp": size} for size in reversed(fitting)),
                    *({"launch.processes": size * mesh.world // tp} for size in reversed(fitting)),
                ],
            ),
        )
    if not any(seam.name == "loss" for seam in plan.seams) and "tp" in plan.get_shard_rules(f"{plan.head}.weight", 2):
        yield Problem(
            f"parallel.tp={tp}: the plan shards {plan.head}.weight over tp, and has no loss seam.",
            "Each rank would compute the loss over its part of the vocabulary instead of the full vocabulary.",
            f'Add Seam("loss", "{plan.head}") to the model\'s plan, or remove the shard rule of this weight.',
        )


def find_loss_problems(mesh: Mesh, tree: Node, plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each head whose vocabulary tp shards, and whose node does not declare its loss.

    tp replaces the loss of such a head, so the loss must be known.
    """
    for path, call in get_calls(tree, plan, "loss").items():
        if call is None and "tp" in plan.get_shard_rules(f"{path}.weight", 2):
            yield Problem(
                f"parallel.tp={mesh.size('tp')}: the model-tree node of {path} does not declare its loss.",
                "Tensor parallelism shards the vocabulary of this head, so it must replace the head's loss function.",
                f"Return a LossCall from the node's `get_seams`, or add ShardRule.replicated({f'{path}.weight'!r}).",
            )


def _divides(name: str, count: int, tp: int) -> bool:
    """Return whether `count` heads, features or vocabulary rows divide over `tp` ranks.

    Several ranks may hold the same key head; the last ranks may have fewer vocabulary rows.
    """
    if name == "vocab_size":
        return count >= tp
    return count % tp == 0 or (name == "kv_heads" and tp % count == 0)


def _count_units(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the numbers of units (heads, features, rows) that tp has to divide.

    The key is the name of a fact such as "heads", or else the pattern of the plan's sharding rule.
    """
    facts = {name: size for name in ("heads", "kv_heads", "ffn_dim") if (size := plan.facts.get(name))}
    units: dict[str, int] = {}
    for name, shape in shapes.items():
        rule = plan.get_shard_rules(name, len(shape)).get("tp")
        if rule is None:
            continue
        count = shape[rule.dim] // rule.granularity
        if rule.dim == 0 and shape[0] == plan.facts.get("vocab_size", shape[0]) and _is_vocabulary(plan, name):
            units["vocab_size"] = count
            continue
        blocks = rule.dim == 1 and plan.is_scales(name)  # each scale's block must be on one rank
        fact = None if blocks else next((fact for fact, size in facts.items() if size == count), None)
        units[fact or rule.pattern] = count
    return units


def _is_vocabulary(plan: Plan, name: str) -> bool:
    return any(matches(part, name) for part in (plan.embed, plan.head))


def _name_option(name: str) -> str:
    return f"model.{name}" if name in ("heads", "kv_heads", "ffn_dim", "vocab_size") else name


# --- tokens ----------------------------------------------------------------------------------------------------------


def find_context_problems(config: AxesConfig, run: Run, mesh: Mesh, plan: Plan) -> Iterator[Problem]:
    """Yield a problem if the plan has no attention seam, or if cp does not divide the heads for Ulysses."""
    cp, tp = mesh.size("cp"), mesh.size("tp")
    if not any(seam.name == "attention" for seam in plan.seams):
        yield Problem(
            f"parallel.cp={cp}: the plan of this model has no attention seam.",
            "The tokens of a sequence are on several ranks, and attention can exchange tokens only at a seam.",
            'Add Seam("attention", "blocks.*.attention") to the model\'s plan, or use parallel.cp=1.',
        )
    heads = plan.facts.get("heads")
    if config.context == "ulysses" and heads and heads % tp == 0 and (heads // tp) % cp:
        own = f"the {heads // tp} heads of a rank with parallel.tp={tp}" if tp > 1 else f"model.heads={heads}"
        yield Problem(
            f"parallel.cp={cp} does not divide {own}.",
            "Ulysses gives each context-parallel rank all tokens of some of the heads (arXiv 2309.14509).",
            nearest_accepted(
                run,
                [{"parallel.context": "ring"}, *({"parallel.cp": size} for size in find_divisors(heads // tp)[::-1])],
            ),
        )


def find_attention_problems(config: AxesConfig, mesh: Mesh, tree: Node, plan: Plan) -> Iterator[Problem]:
    """Yield a problem for undeclared attention, and for each kind of attention that ring attention does not support."""
    ring = config.context == "ring"
    refused: dict[str, list[str]] = {}
    for path, call in get_calls(tree, plan, "attention").items():
        if not isinstance(call, AttentionCall):
            refused.setdefault("", []).append(path)
        elif ring and (extras := explain_unsupported(call)):
            refused.setdefault(extras, []).append(path)
    does = "ring attention cannot replace" if ring else "Ulysses cannot pass some of the heads to"
    why = (
        "Ring attention computes declared calls only."
        if ring
        else "Parameters per head could be applied to other heads."
    )
    for extras, paths in refused.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield Problem(
            f"parallel.cp={mesh.size('cp')}: {does} {paths[0]}{more}: "
            + (f"the attention has {extras}." if extras else "the node does not declare its attention."),
            "Ring attention supports causal and bidirectional attention, windows and scales." if extras else why,
            "parallel.context=ulysses, which calls the module's own attention; or parallel.cp=1."
            if extras
            else "Declare the attention: `get_seams` of the node returns an AttentionCall, with `other` for features "
            "without a field (docs/how-to/model-seams.md). Or use parallel.cp=1.",
        )


def find_untraceable(tree: Node, plan: Plan) -> Iterator[Problem]:
    """Yield a problem if the model has attention whose GPU operator the meta device lacks (for `--trace`)."""
    for path, call in get_calls(tree, plan, "attention").items():
        if isinstance(call, AttentionCall) and explain_unsupported(call):
            yield Problem(
                f"--trace does not support {path}, whose attention has {explain_unsupported(call)}.",
                "A GPU uses compiled FlexAttention, but --trace would run the CPU path, which stores all scores.",
                "Leave --trace out: the estimate counts this attention.",
            )
            return


def compute_sequence_unit(config: AxesConfig, mesh: Mesh) -> int:
    """Return the number that must divide the sequence length, for cp, zigzag chunks and sequence parallelism."""
    cp, tp = mesh.size("cp"), mesh.size("tp")
    zigzag = 2 if cp > 1 and config.context == "ring" else 1
    return cp * lcm(zigzag, tp if config.sequence_parallel else 1)


def find_sequence_problems(config: AxesConfig, length: int, mesh: Mesh) -> Iterator[Problem]:
    """Yield a problem if cp, or tp with sequence parallelism, does not divide the sequence length `length`."""
    unit = compute_sequence_unit(config, mesh)
    if length % unit == 0:
        return
    cp, tp = mesh.size("cp"), mesh.size("tp") if config.sequence_parallel else 1
    parts = [f"cp {cp}"] * (cp > 1) + [f"tp {tp} (sequence parallelism)"] * (tp > 1)
    halves = (
        " Ring attention gives each rank an early and a late chunk, so that all ranks have equal work."
        if cp > 1
        else ""
    )
    near = sorted({max(unit, length // unit * unit), -(-length // unit) * unit})
    without = replace(config, sequence_parallel=False)
    also = "; or parallel.sequence_parallel=false" if length % compute_sequence_unit(without, mesh) == 0 else ""
    yield Problem(
        f"batch.sequence_length={length} does not divide over {' x '.join(parts)}.",
        f"The sequence length must be a multiple of {unit}." + (halves if config.context == "ring" else ""),
        f"Nearest: {' or '.join(f'batch.sequence_length={size}' for size in near)}{also}",
    )


# --- blocks ----------------------------------------------------------------------------------------------------------


def find_pipeline_problems(config: AxesConfig, run: Run, mesh: Mesh, plan: Plan) -> Iterator[Problem]:
    """Yield a problem if a stage would have no block, or if `parallel.stages` has the wrong length or sum."""
    pp, chunks = mesh.size("pp"), config.model_chunks
    stages, each = pp * chunks, f" with {chunks} chunks per rank" if chunks > 1 else ""
    if stages > plan.layers:
        most = max(plan.layers // chunks, 1)
        fewer = [size for size in range(chunks - 1, 0, -1) if SCHEDULES[config.schedule].free_chunks and size > 1]
        smaller = [size for size in range(most, 0, -1) if size < pp]
        changes: list[dict[str, object]] = [{"parallel.chunks": size} for size in fewer]
        changes += [{"parallel.schedule": "1f1b", "parallel.chunks": None}] if config.chunks else []
        changes += [{"parallel.schedule": "1f1b"}] if chunks > 1 else []
        changes += [{"parallel.pp": size} for size in smaller]
        changes += [{"launch.processes": size * mesh.world // pp} for size in smaller]
        yield Problem(
            f"parallel.pp={pp}{each} makes {stages} stages, and the model has {plan.layers} blocks.",
            "Every stage needs at least one block.",
            nearest_accepted(run, changes),
        )
    elif config.stages is not None and (len(config.stages) != stages or sum(config.stages) != plan.layers):
        from gangline_parallel_megatron_style.layout.stages import balance

        even = balance([1.0] * plan.layers, stages)
        yield Problem(
            f"parallel.stages={config.stages} has {len(config.stages)} stages and {sum(config.stages)} blocks.",
            f"parallel.pp={pp}{each} makes {stages} stages, and the model has {plan.layers} blocks.",
            f"parallel.stages={even}, or null to balance the stages.".replace(" ", "", stages - 1),
        )


# --- folds -----------------------------------------------------------------------------------------------------------


def find_fold_problems(config: AxesConfig, mesh: Mesh, fold: Fold) -> Iterator[Problem]:
    """Yield a problem if a fold does not divide the ranks of its axes, or uses tp without sequence parallelism.

    A fold whose axes have one rank has no problems.
    """
    have = mesh.size(*fold.out_of)
    if have == 1:
        return
    axes = " x ".join(f"{axis} {mesh.size(axis)}" for axis in mesh.axes if axis in fold.out_of)
    if have % fold.size:
        yield Problem(
            f"{fold.name}={fold.size} does not divide the ranks of {axes}.",
            f"The {have} ranks of these axes are divided into groups of equal size.",
            f"Sizes of {fold.name} that fit: {', '.join(map(str, find_divisors(have)))}.",
        )
    elif mesh.size("tp") > 1 and "tp" in fold.out_of and not config.sequence_parallel:
        yield Problem(
            f"{fold.name} uses ranks of tp, which needs parallel.sequence_parallel=true.",
            "Without sequence parallelism all tp ranks have the same tokens, and would repeat the computation.",
            "parallel.sequence_parallel=true",
        )


# --- optimizer -------------------------------------------------------------------------------------------------------


def find_row_block_problems(
    run: Run, mesh: Mesh, plan: Plan, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Problem]:
    """Yield a problem if sharding of the last dim splits an optimizer block (`OptimizerConfig.count_row_block`)."""
    parted: dict[str, int] = {}  # parameter name -> greatest common divisor of its shard bounds in a row
    block = 1
    for name, shape in shapes.items():
        row_block = 1 if plan.is_frozen(name) else run.optimizer.count_row_block(shape)
        if row_block == 1:
            continue
        try:
            divisions = cut_array(name, shape, plan, mesh).divisions
        except ValueError:  # a dim does not divide, which another check reports
            continue
        inside = [
            at
            for division in divisions
            if division.dim == len(shape) - 1
            for at in division.bounds[0]
            if at < shape[-1]
        ]
        if any(at % row_block for at in inside):
            parted[name], block = gcd(*inside), row_block
    if not parted:
        return
    name = min(parted, key=lambda name: parted[name])
    fitting = [size for size in find_divisors(gcd(*parted.values()))[::-1] if size <= block]
    more = f" and {len(parted) - 1} more" if len(parted) > 1 else ""
    yield Problem(
        f"the optimizer needs blocks of {block} elements of a row on one rank, and this layout splits blocks of "
        f"{name}{more}.",
        f"Rows of {shapes[name][-1]} elements are split at multiples of {parted[name]}.",
        nearest_accepted(run, [*({"optimizer.block": size} for size in fitting if size >= 16), {"parallel.tp": 1}]),
    )
