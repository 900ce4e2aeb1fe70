"""Sources that a run may go on with although they are not what they were: a corpus grew, a mixture is to change."""

from __future__ import annotations

from typing import Any

from gangline import UserError
from gangline_dataloader.order.single import SingleOrder
from gangline_dataloader.sources.windows import WindowSource
from gangline_dataloader.store.stored import StoreTokens


class GrowingSource(WindowSource):
    """One store, to which shards may be added: the epoch under way goes on without them, the next one has them."""

    def continues(self, fingerprint: str, cursor: int, state: dict[str, Any]) -> bool:
        if fingerprint == self.fingerprint():
            return True
        store, order = self.stores[0], self.order
        if not isinstance(store, StoreTokens) or not isinstance(order, SingleOrder):
            return False
        if fingerprint != self.fingerprint_of(state):
            return False
        ((name, first, identity),) = state["parts"]
        mine = self.state(cursor)["parts"][0]
        if [name, first] != mine[:2] or store.manifest.grew_from(identity) is None:
            return False
        self.change_order(order.after(state["order"], cursor))
        return True


class MixedSource(WindowSource):
    """Stores by weights, which may change from the next sample on; sources may come that had no weight before it."""

    def continues(self, fingerprint: str, cursor: int, state: dict[str, Any]) -> bool:
        """Raises UserError where the stores are the same, and their weights say something else about the past."""
        if fingerprint == self.fingerprint():
            return True
        if fingerprint != self.fingerprint_of(state):
            return False
        now = self.state(cursor)
        parts, sources = {part[0]: part for part in now["parts"]}, now["order"]["sources"]
        if any(parts.get(part[0]) != list(part) for part in state["parts"]):
            return False
        before = [stage for stage in state["order"]["stages"] if stage[0] < cursor]
        after = [stage for stage in now["order"]["stages"] if stage[0] < cursor]
        caps = {name: each for name, each in state["order"]["sources"].items() if sources[name] != each}
        if before != after or caps:
            raise _of_the_past(cursor, before, after, caps)
        return True


def _of_the_past(cursor: int, before: list[Any], after: list[Any], caps: dict[str, Any]) -> UserError:
    what = f"data.epochs of {', '.join(sorted(caps))}" if before == after else "data.weights and data.stages"
    why = f"It stands at sample {cursor}."
    if before != after:
        why = f"{why} Up to there its shares were {before}, and now they are {after}."
    mend = f"Leave those, and add what is to come: 'data.stages=[..., {{from: {cursor}, weights: ...}}]'"
    return UserError(f"{what} would change samples that the run has read.", why, mend)
