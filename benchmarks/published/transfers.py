"""Edit the transfers of a layout: those that other software hides, makes smaller, or repeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gangline.explain.explained import Explained, Transfer


def overlap(found: Explained, axis: str) -> Explained:
    """Mark the transfers along an axis as hidden behind computation."""
    return _edited(found, lambda sent: sent.axes == (axis,), lambda sent: replace(sent, waits=False))


def expose(found: Explained, *purposes: str) -> Explained:
    """Mark the transfers of these purposes after the passes as not hidden."""
    return _edited(
        found,
        lambda sent: sent.purpose in purposes and sent.when in ("end", "update"),
        lambda sent: replace(sent, waits=True),
    )


def halve(found: Explained, purpose: str) -> Explained:
    """Halve the bytes of one purpose along all axes except tp."""
    return _edited(
        found,
        lambda sent: sent.purpose == purpose and sent.axes != ("tp",),
        lambda sent: replace(sent, bytes=int(0.5 * sent.bytes)),
    )


def all_reduce_gradients(found: Explained) -> Explained:
    """Replace the reduce-scatter of gradients by an all-reduce.

    nanotron does this, although each rank needs only a shard (trainer.py, `training_step`: reduce_scatter=False).
    """
    return _edited(
        found,
        lambda sent: sent.operation == "reduce_scatter" and sent.purpose == "gradients",
        lambda sent: replace(sent, operation="all_reduce", bytes=2 * sent.bytes),
    )


def send_rows_once(found: Explained, top_k: int, nodes: int | None) -> Explained:
    """Send a token only once to each rank (or, between nodes, to each node) that has any of its experts.

    As in DeepEP and HybridEP. The number of destinations is the expected number of different ranks or nodes among
    `top_k` random draws; between nodes at most `nodes`.
    """

    def edit(sent: Transfer) -> Transfer:
        places = sent.ranks if sent.tier == "node" else max(2, sent.ranks // max(1, sent.each_node))
        different = places * (1 - (1 - 1 / places) ** top_k)
        if sent.tier != "node" and nodes is not None:
            different = min(different, nodes)
        return replace(sent, bytes=int(sent.bytes * different / top_k))

    return _edited(found, lambda sent: sent.axes == ("ep",), edit)


def send_rows_again(found: Explained) -> Explained:
    """Repeat the dispatch of tokens in the backward pass, for recomputed experts."""

    def doubled(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        more = (replace(sent, when="B") for sent in transfers if sent.axes == ("ep",) and sent.when == "F")
        return (*transfers, *more)

    return replace(found, ranks=tuple(replace(rank, transfers=doubled(rank.transfers)) for rank in found.ranks))


def _edited(found: Explained, chosen: Callable[[Transfer], bool], edit: Callable[[Transfer], Transfer]) -> Explained:
    def edited(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(edit(sent) if chosen(sent) else sent for sent in transfers)

    return replace(found, ranks=tuple(replace(rank, transfers=edited(rank.transfers)) for rank in found.ranks))
