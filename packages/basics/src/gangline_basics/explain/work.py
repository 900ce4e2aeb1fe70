"""Work of a node and of all nodes in it on one rank: its matmuls after sharding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from gangline.explain.work import StageWork
from gangline.model.flops import computes_frozen
from gangline.model.linear_nodes import LinearNode
from gangline.model.local_sizes import LocalSizes
from gangline.model.matmuls import AnyMatmul, AttentionMatmuls, Matmul
from gangline.model.tree import Node, iterate_children, iterate_nodes
from gangline.plan import Plan


def count_work(
    node: Node, path: str, plan: Plan, sizes: LocalSizes, *, sequence_length: int, ulysses: bool = False
) -> StageWork:
    """Return the work of the node at `path` and of all nodes in it, without recomputation and saved bytes.

    sizes: local sizes of a rank. A matmul that tp shards reads `inner_tokens` tokens; any other matmul reads the
    `tokens` of the residual stream. A node is reported as unknown if the FLOPs of its matmuls do not sum to the FLOPs
    that it declares, or if it has no child and declares neither FLOPs, parameters nor saved bytes.
    ulysses: whether cp exchanges tokens for heads, so that attention sees full sequences; otherwise a rank computes
    attention only for the queries of its own tokens.
    """
    tp, cp = sizes.size("tp"), sizes.size("cp")
    sequences = max(1, sizes.inner_tokens * cp // sequence_length)
    tokens = sequences * sequence_length
    whole = replace(sizes, tokens=tokens, inner_tokens=tokens, ranks={})
    forward: Counter[AnyMatmul] = Counter()
    weights: Counter[AnyMatmul] = Counter()
    unknown, unknown_flops, modules = [], 0, 0
    for at, inner in iterate_nodes(node, path):
        modules += 1
        matmuls = inner.list_matmuls(whole, sequence_length)
        claimed = inner.count_flops(sequence_length) * tokens
        silent = not claimed and not inner.get_shapes() and next(iterate_children(inner), None) is None
        if silent and inner.count_activation_bytes(whole) is None:
            unknown.append(at)
        if matmuls is None or abs(sum(matmul.flops for matmul in matmuls) - claimed) > 0.01 * claimed:
            if claimed:
                unknown.append(at)
                unknown_flops += claimed * sizes.inner_tokens // tokens // tp
            continue
        frozen = computes_frozen(at, inner, plan)
        for matmul in matmuls:
            local: AnyMatmul
            if isinstance(matmul, AttentionMatmuls):
                # if False, the FLOPs of a rank are the average over ranks
                trades = ulysses and matmul.heads % (tp * cp) == 0
                share = tp * cp if trades else tp
                local = replace(
                    matmul,
                    sequences=sequences,
                    queries=sequence_length if trades else sequence_length // cp,
                    heads=max(1, matmul.heads // share),
                    kv_heads=max(1, matmul.kv_heads // share),
                )
            else:
                local = _split_matmul(
                    matmul, f"{at}.{matmul.weight}" if at else matmul.weight, inner, plan, sizes, tokens
                )
            forward[local] += 1
            if not frozen and isinstance(local, Matmul):
                weights[local] += 1
    return StageWork(forward, weights, modules=modules, unknown=tuple(unknown), unknown_flops=unknown_flops)


def _split_matmul(matmul: Matmul, name: str, node: Node, plan: Plan, sizes: LocalSizes, tokens: int) -> Matmul:
    """Return the matmul of one rank: axes of the mesh shard its columns, its inner dim or its matrices."""
    shape = node.get_shapes()[matmul.weight]
    rules = plan.get_shard_rules(name, len(shape))
    parallel = sizes.size("tp") > 1 and "tp" in rules
    rows = matmul.rows * (sizes.inner_tokens if parallel else sizes.tokens) // tokens
    inner, columns, matrices = matmul.inner, matmul.columns, matmul.matrices
    for axis, rule in rules.items():
        ranks = sizes.size(axis)
        if ranks == 1:
            continue
        if rule.dim == len(shape) - 1:
            inner = max(1, inner // ranks)
        elif rule.dim == len(shape) - 2:
            columns = -(-columns // ranks)
        else:
            matrices = max(1, matrices // ranks)
    return replace(
        matmul,
        rows=rows,
        inner=inner,
        columns=columns,
        matrices=matrices,
        weight="weight",
        block=name.startswith(f"{plan.blocks}.") or (bool(plan.head_blocks) and isinstance(node, LinearNode)),
    )
