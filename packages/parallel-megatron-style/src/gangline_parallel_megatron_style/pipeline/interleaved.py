"""Interleaved 1F1B schedule of Megatron-LM: several model chunks per rank."""

from __future__ import annotations

from gangline_parallel_megatron_style.pipeline.actions import PipelineAction, Schedule, truncate_schedule


def make_interleaved_1f1b_schedule(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Make the interleaved 1F1B schedule: a group of p microbatches passes all chunks of a rank before the next group.

    Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv
    2104.04473, section 2.2.2. The paper requires m to be a multiple of p; here the last group may be smaller.
    Idle time of each rank, if p divides m: (p - 1)(F + B) with F and B of one chunk, 1/chunks of 1F1B's idle time.
    Peak activations on rank r: min(m * chunks, 2(p - r - 1) + (chunks - 1) p + 1), each of one microbatch in one chunk.
    """
    groups = -(-microbatches // ranks)
    total = groups * ranks * chunks

    def locate_action(number: int, backward: bool) -> tuple[int, int]:
        """Return the (chunk, microbatch) of a rank's forward or backward number `number`, from 0."""
        group, within = divmod(number, ranks * chunks)
        chunk, microbatch = divmod(within, ranks)
        return (chunks - 1 - chunk if backward else chunk), group * ranks + microbatch

    def order(rank: int) -> list[PipelineAction]:
        ahead = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
        actions = [PipelineAction("F", *locate_action(number, False)) for number in range(ahead)]
        for number in range(total):
            if number + ahead < total:
                actions.append(PipelineAction("F", *locate_action(number + ahead, False)))
            actions.append(PipelineAction("B", *locate_action(number, True)))
        return actions

    return truncate_schedule(ranks, microbatches, chunks, "loop", order)
