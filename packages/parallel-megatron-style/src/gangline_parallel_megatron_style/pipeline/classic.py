"""Schedules of one chunk a rank: GPipe, 1F1B and ZB-H1."""

from __future__ import annotations

from gangline_parallel_megatron_style.pipeline.actions import Action, Schedule


def gpipe(ranks: int, micros: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965).

    Idle time of each rank: (p - 1)(F + B). Activations: all m microbatches.
    """
    forward = [Action("F", 0, micro) for micro in range(micros)]
    order = (*forward, *(Action("B", 0, micro) for micro in range(micros)))
    return Schedule(ranks, 1, micros, "loop", (order,) * ranks)


def one_f_one_b(ranks: int, micros: int) -> Schedule:
    """Fill the pipeline, then a backward after each forward (PipeDream-Flush: arXiv 2006.09503; 2104.04473, 2.2.1).

    Idle time of each rank: (p - 1)(F + B), as GPipe's. Activations on rank r: min(m, p - r).
    """

    def order(rank: int) -> tuple[Action, ...]:
        ahead = min(micros, ranks - rank - 1)
        actions = [Action("F", 0, micro) for micro in range(ahead)]
        for micro in range(micros):
            if micro + ahead < micros:
                actions.append(Action("F", 0, micro + ahead))
            actions.append(Action("B", 0, micro))
        return tuple(actions)

    return Schedule(ranks, 1, micros, "loop", tuple(map(order, range(ranks))))


def zb_h1(ranks: int, micros: int) -> Schedule:
    """1F1B whose backward is cut in two: rank r keeps r gradients of weights back, to compute while it would wait.

    Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2 and table 2.
    Idle time of each rank: (p - 1)(F + I - W). Activations: at most p on every rank (p - r under way, r put off).
    """

    def order(rank: int) -> tuple[Action, ...]:
        ahead = min(micros, ranks - rank - 1)
        actions = [Action("F", 0, micro) for micro in range(ahead)]
        for micro in range(micros):
            if micro + ahead < micros:
                actions.append(Action("F", 0, micro + ahead))
            actions.append(Action("I", 0, micro))
            if micro >= rank:
                actions.append(Action("W", 0, micro - rank))
        actions += [Action("W", 0, micro) for micro in range(max(0, micros - rank), micros)]
        return tuple(actions)

    return Schedule(ranks, 1, micros, "loop", tuple(map(order, range(ranks))))
