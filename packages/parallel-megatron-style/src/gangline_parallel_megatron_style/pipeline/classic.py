"""Pipeline schedules with one model chunk per rank: GPipe, 1F1B and ZB-H1."""

from __future__ import annotations

from gangline_parallel_megatron_style.pipeline.actions import PipelineAction, Schedule


def make_gpipe_schedule(ranks: int, microbatches: int) -> Schedule:
    """Make the GPipe schedule: all forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965).

    Idle time of each rank: (p - 1)(F + B). Peak activations: all m microbatches.
    """
    forward = [PipelineAction("F", 0, microbatch) for microbatch in range(microbatches)]
    order = (*forward, *(PipelineAction("B", 0, microbatch) for microbatch in range(microbatches)))
    return Schedule(ranks, 1, microbatches, "loop", (order,) * ranks)


def make_1f1b_schedule(ranks: int, microbatches: int) -> Schedule:
    """Make the 1F1B schedule: fill the pipeline, then alternate forwards and backwards.

    PipeDream-Flush: arXiv 2006.09503; 2104.04473, section 2.2.1.
    Idle time of each rank: (p - 1)(F + B), equal to GPipe. Peak activations on rank r: min(m, p - r) microbatches.
    """

    def order(rank: int) -> tuple[PipelineAction, ...]:
        ahead = min(microbatches, ranks - rank - 1)
        actions = [PipelineAction("F", 0, microbatch) for microbatch in range(ahead)]
        for microbatch in range(microbatches):
            if microbatch + ahead < microbatches:
                actions.append(PipelineAction("F", 0, microbatch + ahead))
            actions.append(PipelineAction("B", 0, microbatch))
        return tuple(actions)

    return Schedule(ranks, 1, microbatches, "loop", tuple(map(order, range(ranks))))


def make_zb_h1_schedule(ranks: int, microbatches: int) -> Schedule:
    """Make the ZB-H1 schedule: 1F1B with a split backward; rank r defers r weight gradients to its idle time.

    Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2 and table 2.
    Idle time of each rank: (p - 1)(F + I - W). Peak activations on rank r: at most p microbatches, p - r between F and
    I and r with a deferred W.
    """

    def order(rank: int) -> tuple[PipelineAction, ...]:
        ahead = min(microbatches, ranks - rank - 1)
        actions = [PipelineAction("F", 0, microbatch) for microbatch in range(ahead)]
        for microbatch in range(microbatches):
            if microbatch + ahead < microbatches:
                actions.append(PipelineAction("F", 0, microbatch + ahead))
            actions.append(PipelineAction("I", 0, microbatch))
            if microbatch >= rank:
                actions.append(PipelineAction("W", 0, microbatch - rank))
        actions += [
            PipelineAction("W", 0, microbatch) for microbatch in range(max(0, microbatches - rank), microbatches)
        ]
        return tuple(actions)

    return Schedule(ranks, 1, microbatches, "loop", tuple(map(order, range(ranks))))
