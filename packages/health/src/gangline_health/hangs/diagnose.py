"""From what every rank's pulse says to the rank and the operation that the others wait for. Pure, torch-free.

A rank that stands still is not to blame where it waits for another one that has not begun the same collective; whom
they all wait for is. A rank that others wait for and that still comes on is slow, and no hang.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gangline_health.pulses import Collective, Seen


@dataclass(frozen=True)
class Watched:
    """A rank as its watcher sees it."""

    seen: Seen
    still: float  # seconds without a change of its pulse
    limit: float  # seconds that it may stand still where it is
    state: str  # of its main thread in /proc: R, S, D, T (stopped), Z; "" where it is gone
    host: str = ""

    @property
    def rank(self) -> int:
        return self.seen.rank

    @property
    def stopped(self) -> bool:
        return self.state == "T"

    @property
    def overdue(self) -> bool:
        return self.still >= self.limit


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong.

    why  "stopped" (by a signal), "behind" (others wait for it in a collective), "alone" (nobody waits for it
         yet), "mismatch" (ranks are in different operations), "transfer" (all are in the same one, and it does not end)
    """

    ranks: tuple[int, ...]
    why: str
    operation: str
    evidence: str


def diagnose(ranks: Sequence[Watched]) -> Diagnosis | None:
    """None while nobody is overdue, or those who are wait for a rank that comes on."""
    late = [one for one in ranks if one.overdue]
    if not late or not all(one.seen.alive for one in ranks):  # who has ended, the launcher knows
        return None
    if stopped := [one for one in late if one.stopped]:
        return _name_culprits("stopped", stopped, ranks)
    busy = [one for one in late if one.seen.waits is None]
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
                return None  # it comes on, or nothing is known of it yet
            absent[rank] = other
    apart = _mismatch(late)
    if apart is not None:
        return apart
    if absent:  # each waits for another: the one that is the furthest behind
        first = min(absent.values(), key=lambda one: sum(one.seen.begun.values()))
        return _name_culprits("mismatch", [first], ranks)
    one = min(late, key=lambda one: one.seen.since)
    assert one.seen.waits is not None
    everyone = ", ".join(str(each.rank) for each in late)
    evidence = f"ranks {everyone} are all in {_word(one.seen.waits)}, which has not ended for {one.still:.1f} s"
    return Diagnosis(tuple(each.rank for each in late), "transfer", _word(one.seen.waits), evidence)


def _find_awaited(one: Watched, by_rank: dict[int, Watched]) -> list[int]:
    """The ranks that have not come to where this one waits."""
    waits = one.seen.waits
    if waits is None or waits.ranks is None:
        return []
    if waits.operation == "exchange":
        others = [waits.ranks[peer] for peer in waits.peers if peer < len(waits.ranks)]
        return [rank for rank in others if rank not in by_rank or not by_rank[rank].overdue]
    group = waits.axis, waits.ranks
    return [
        rank
        for rank in waits.ranks
        if rank != one.rank and (rank not in by_rank or by_rank[rank].seen.begun.get(group, 0) < waits.sequence)
    ]


def _is_missing(one: Watched, ranks: Sequence[Watched]) -> bool:
    """Whether another rank waits in a collective that this one has not begun."""
    return any(
        one.rank in _find_awaited(other, {each.rank: each for each in ranks}) for other in ranks if other is not one
    )


def _mismatch(late: Sequence[Watched]) -> Diagnosis | None:
    """Ranks that have begun different operations as the same one of a group: the first, and who is alone with his."""
    said: dict[tuple[str, tuple[int, ...], int], dict[int, Collective]] = {}
    for one in late:
        for each in one.seen.recent:
            if each.ranks is not None and each.operation != "exchange":
                said.setdefault((each.axis, each.ranks, each.sequence), {})[one.rank] = each
    for by_rank in sorted(said.values(), key=lambda found: min(each.began for each in found.values())):
        counts = Counter(each.operation for each in by_rank.values())
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            odd = {rank: each for rank, each in by_rank.items() if each.operation != usual}
            first = next(iter(odd.values()))
            words = "; ".join(f"rank {rank}: {_word(each)}" for rank, each in sorted(by_rank.items()))
            return Diagnosis(tuple(sorted(odd)), "mismatch", _word(first), words)
    return None


def _name_culprits(why: str, culprits: list[Watched], ranks: Sequence[Watched]) -> Diagnosis:
    culprits = sorted(culprits, key=lambda one: (one.seen.step, one.seen.since))
    first = culprits[0]
    waits = first.seen.waits
    operation = _first_missing(first, ranks) or (_word(waits) if waits else first.seen.phase)
    where = f"in {_word(waits)}, part of {first.seen.under}" if waits else f"in {first.seen.phase}"
    if first.seen.member:  # "health/mine", as a user chose it
        where += f", in what {first.seen.member.replace('/', '=', 1)} does"
    how = "is stopped by a signal (state T)" if why == "stopped" else "stands still"
    host = f" on {first.host}" if first.host else ""
    evidence = [f"rank {first.rank} (process {first.seen.pid}{host}) {how}, {where} of step {first.seen.step}, for "
                f"{first.still:.1f} s; its limit is {first.limit:.1f} s"]  # fmt: skip
    waiting = [one.rank for one in ranks if one.rank not in [each.rank for each in culprits] and one.seen.waits]
    if waiting:
        evidence.append(f"ranks {', '.join(map(str, waiting))} wait in {operation}")
    return Diagnosis(tuple(one.rank for one in culprits), why, operation, "; ".join(evidence))


def _first_missing(one: Watched, ranks: Sequence[Watched]) -> str:
    """The first operation that others have begun and this rank has not."""
    found = []
    for other in ranks:
        for each in (*other.seen.recent, *([other.seen.waits] if other.seen.waits else ())):
            begun = one.seen.begun.get((each.axis, each.ranks), 0)
            if each.ranks is not None and one.rank in each.ranks and each.peers == () and each.sequence > begun:
                found.append(each)
    return _word(min(found, key=lambda each: (each.began, each.sequence))) if found else ""


def _word(each: Collective) -> str:
    return f"{each.operation} {each.sequence} along {each.axis}"
