"""Diagnosis of a hang: finds in the pulses of all ranks the rank and operation that other ranks wait for. Torch-free.

Pure functions. A rank without progress is not to blame while it waits for a rank that has not begun the same
collective; the rank that is waited for is to blame. If that rank still makes progress, it is slow, not hung.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gangline_health.pulses import Collective, Seen


@dataclass(frozen=True)
class Watched:
    """State of a rank as observed by the hang watcher of its machine."""

    pulse: Seen
    still: float  # seconds since the pulse of the rank last changed
    limit: float  # hang timeout of its phase: maximum seconds without a change of the pulse
    state: str  # state of the main thread in /proc: R, S, D, T (stopped), Z; "" if the process has ended
    host: str = ""

    @property
    def rank(self) -> int:
        return self.pulse.rank

    @property
    def stopped(self) -> bool:
        return self.state == "T"

    @property
    def overdue(self) -> bool:
        return self.still >= self.limit


@dataclass(frozen=True)
class Diagnosis:
    """Cause of a hang: the ranks to blame and their operation.

    why  "stopped": a signal stopped the rank; "behind": other ranks wait for it in a collective; "alone": no rank waits
         for it yet; "mismatch": ranks began different operations; "transfer": all ranks began the same operation, which
         does not end
    """

    ranks: tuple[int, ...]
    why: str
    operation: str
    evidence: str


def diagnose(ranks: Sequence[Watched]) -> Diagnosis | None:
    """Return the cause of a hang; None if no rank is overdue, or if overdue ranks wait for a rank that makes progress.

    Returns None also if the process of a rank has ended: the launcher handles that.
    """
    late = [one for one in ranks if one.overdue]
    if not late or not all(one.pulse.alive for one in ranks):  # the launcher handles a process that has ended
        return None
    if stopped := [one for one in late if one.stopped]:
        return _name_culprits("stopped", stopped, ranks)
    busy = [one for one in late if one.pulse.waits is None]
    if busy:
        behind = [one for one in busy if _is_missing(one, ranks)]
        return _name_culprits("behind" if behind else "alone", behind or busy, ranks)
    return _diagnose_transfer(late, ranks)


def _diagnose_transfer(late: list[Watched], ranks: Sequence[Watched]) -> Diagnosis | None:
    by_rank = {one.rank: one for one in ranks}
    absent: dict[int, Watched] = {}
    for one in late:
        for rank in _find_awaited(one, by_rank):
            other = by_rank.get(rank)
            if other is None or not other.overdue:
                return None  # that rank makes progress, or its state is not known yet
            absent[rank] = other
    apart = _find_mismatch(late)
    if apart is not None:
        return apart
    if absent:  # ranks wait for each other: blame the rank that began the fewest collectives
        first = min(absent.values(), key=lambda one: sum(one.pulse.begun.values()))
        return _name_culprits("mismatch", [first], ranks)
    one = min(late, key=lambda one: one.pulse.since)
    assert one.pulse.waits is not None
    everyone = ", ".join(str(each.rank) for each in late)
    collective = _describe_collective(one.pulse.waits)
    evidence = f"ranks {everyone} all wait in {collective}, which has not finished for {one.still:.1f} s"
    return Diagnosis(tuple(each.rank for each in late), "transfer", collective, evidence)


def _find_awaited(one: Watched, by_rank: dict[int, Watched]) -> list[int]:
    """Return the ranks that have not begun the operation in which rank `one` waits."""
    waits = one.pulse.waits
    if waits is None or waits.ranks is None:
        return []
    if waits.operation == "exchange":
        others = [waits.ranks[peer] for peer in waits.peers if peer < len(waits.ranks)]
        return [rank for rank in others if rank not in by_rank or not by_rank[rank].overdue]
    group = waits.axis, waits.ranks
    return [
        rank
        for rank in waits.ranks
        if rank != one.rank and (rank not in by_rank or by_rank[rank].pulse.begun.get(group, 0) < waits.sequence)
    ]


def _is_missing(one: Watched, ranks: Sequence[Watched]) -> bool:
    """Return whether another rank waits in a collective that rank `one` has not begun."""
    return any(
        one.rank in _find_awaited(other, {each.rank: each for each in ranks}) for other in ranks if other is not one
    )


def _find_mismatch(late: Sequence[Watched]) -> Diagnosis | None:
    """Return a diagnosis that blames the minority in the earliest collective with different operations; else None."""
    collectives: dict[tuple[str, tuple[int, ...], int], dict[int, Collective]] = {}
    for one in late:
        for each in one.pulse.recent:
            if each.ranks is not None and each.operation != "exchange":
                collectives.setdefault((each.axis, each.ranks, each.sequence), {})[one.rank] = each
    for by_rank in sorted(collectives.values(), key=lambda found: min(each.began for each in found.values())):
        counts = Counter(each.operation for each in by_rank.values())
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            odd = {rank: each for rank, each in by_rank.items() if each.operation != usual}
            first = next(iter(odd.values()))
            words = "; ".join(f"rank {rank}: {_describe_collective(each)}" for rank, each in sorted(by_rank.items()))
            return Diagnosis(tuple(sorted(odd)), "mismatch", _describe_collective(first), words)
    return None


def _name_culprits(why: str, culprits: list[Watched], ranks: Sequence[Watched]) -> Diagnosis:
    culprits = sorted(culprits, key=lambda one: (one.pulse.step, one.pulse.since))
    first = culprits[0]
    waits = first.pulse.waits
    operation = _find_first_missing(first, ranks) or (_describe_collective(waits) if waits else first.pulse.phase)
    where = f"in {_describe_collective(waits)}, part of {first.pulse.under}" if waits else f"in {first.pulse.phase}"
    if first.pulse.member:  # a callback or health check that core has called, such as "health/mine"
        where += f" (in code of {first.pulse.member.replace('/', '=', 1)})"
    how = "is stopped by a signal (state T)" if why == "stopped" else "hangs"
    host = f" on {first.host}" if first.host else ""
    evidence = [f"rank {first.rank} (process {first.pulse.pid}{host}) {how} {where} of step {first.pulse.step}: "
                f"no progress for {first.still:.1f} s (timeout {first.limit:.1f} s)"]  # fmt: skip
    waiting = [one.rank for one in ranks if one.rank not in [each.rank for each in culprits] and one.pulse.waits]
    if waiting:
        evidence.append(f"ranks {', '.join(map(str, waiting))} wait in {operation}")
    return Diagnosis(tuple(one.rank for one in culprits), why, operation, "; ".join(evidence))


def _find_first_missing(one: Watched, ranks: Sequence[Watched]) -> str:
    """Return the first operation that other ranks have begun and rank `one` has not; "" if there is none."""
    collectives = []
    for other in ranks:
        for each in (*other.pulse.recent, *([other.pulse.waits] if other.pulse.waits else ())):
            count = one.pulse.begun.get((each.axis, each.ranks), 0)
            if each.ranks is not None and one.rank in each.ranks and each.peers == () and each.sequence > count:
                collectives.append(each)
    return _describe_collective(min(collectives, key=lambda each: (each.began, each.sequence))) if collectives else ""


def _describe_collective(each: Collective) -> str:
    return f"{each.operation} {each.sequence} along {each.axis}"
