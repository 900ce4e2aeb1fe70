"""Data sources that may change when a run resumes: a store with new shards, a mixture with new weights."""

from __future__ import annotations

from abc import ABC
from typing import Any

from gangline import UserError
from gangline_dataloader.order.mixture import normalise_weights
from gangline_dataloader.order.single import SingleOrder
from gangline_dataloader.sources.mixture import TrainOrder
from gangline_dataloader.sources.packed import PackedSource
from gangline_dataloader.sources.windows import WindowSource


class GrowingSource(WindowSource, ABC):
    """Source of one store that may grow: the current epoch ignores new shards, the next epoch includes them."""

    def continues(self, fingerprint: str, cursor: int, state: dict[str, Any]) -> bool:
        if fingerprint == self.compute_fingerprint():
            return True
        if not isinstance(self.order, SingleOrder) or fingerprint != self.compute_state_fingerprint(state):
            return False
        (part,) = self.parts
        if not part.holds(state["parts"][0]):
            return False
        self.change_order(self.order.resume_after(state["order"], cursor))
        return True


class GrowingWindowSource(GrowingSource):
    """A growing store in windows of T tokens, regardless of document boundaries."""


class GrowingPackedSource(PackedSource, GrowingSource):
    """A growing store in packed rows: the rows of the first shards stay unchanged when a plan grows with its store."""


class MixedSource(WindowSource, ABC):
    """A mixture of stores whose weights may change from the next sample on.

    A source may be added if the samples read so far gave it no weight. Each store may grow, as with GrowingSource.
    """

    def continues(self, fingerprint: str, cursor: int, state: dict[str, Any]) -> bool:
        """Return whether a run may continue, as `DataSource.continues`.

        Raises UserError if the stores fit, but other weights or epochs would change samples that the run has read.
        """
        if fingerprint == self.compute_fingerprint():
            return True
        if not isinstance(self.order, TrainOrder) or fingerprint != self.compute_state_fingerprint(state):
            return False
        parts = {part.name: part for part in self.parts}
        if any(part[0] not in parts or not parts[part[0]].holds(part) for part in state["parts"]):
            return False
        now, was = self.order.deciding, state["order"]
        before = [stage for stage in was["stages"] if stage[0] < cursor]
        after = [stage for stage in now["stages"] if stage[0] < cursor]
        sizes = {name: [[0, had]] if isinstance(had, int) else had for name, (had, _) in was["sources"].items()}
        epochs = {name: epochs for name, (_, epochs) in was["sources"].items()}
        caps = [name for name in epochs if now["sources"][name][1] != epochs[name]]
        if before != after or (caps and not self.order.mixture.gives_same_samples(sizes, epochs, cursor)):
            raise _explain_past_change(cursor, before, after, caps, was["sources"])
        order = self.order.resume_after(sizes, cursor)
        self.change_order(order)
        self.samples = order.samples
        return True


class MixedWindowSource(MixedSource):
    """A mixture in windows of T tokens, regardless of document boundaries."""


class MixedPackedSource(PackedSource, MixedSource):
    """A mixture in packed rows."""


def _explain_past_change(
    cursor: int, before: list[Any], after: list[Any], caps: list[str], sources: dict[str, list[Any]]
) -> UserError:
    what = f"data.epochs of {', '.join(sorted(caps))}" if before == after else "data.weights and data.stages"
    why = f"The run has read the samples before sample {cursor}."
    fix = (
        f"Restore the old values; add a stage for later samples: 'data.stages=[..., {{from: {cursor}, weights: ...}}]'"
    )
    if before != after:
        why = f"{why} The shares of these samples were {before}, and are {after} with the new options."
        rows = {name: had if isinstance(had, int) else had[0][1] for name, (had, _) in sources.items()}
        if before[0][1] == dict(zip(rows, map(str, normalise_weights(list(rows.values()))), strict=True)):
            weights = ", ".join(f"{name}: {count}" for name, count in rows.items())
            why = (
                f"{why}\nThe default of data.weights is the number of sequences of each source, and a source has grown."
            )
            fix = f"'data.weights={{{weights}}}'  restores the old weights; data.stages may change later samples."
    return UserError(f"{what} would change samples that the run has read.", *why.splitlines(), fix)
