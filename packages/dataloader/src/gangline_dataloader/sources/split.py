"""Train and validation splits of a store: the part that `prepare` held out, else the rows at the end of each shard."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gangline import UserError
from gangline_dataloader.packing.pack_plan import PackedRows, name_plan_file
from gangline_dataloader.store.external import is_external, open_tokens
from gangline_dataloader.store.local import LocalTokens
from gangline_dataloader.store.manifest import FILE, VALIDATION, check_without_validation, explain_stray_validation
from gangline_dataloader.store.remote.cache import RemoteCache
from gangline_dataloader.store.remote.fetch import Remote
from gangline_dataloader.store.remote.tokens import RemoteTokens, is_remote
from gangline_dataloader.store.stored import StoreTokens
from gangline_dataloader.store.tokens import Tokens

if TYPE_CHECKING:
    from gangline.data.base import Split


@dataclass(frozen=True, eq=False)
class SplitRows:
    """The rows (sequences) of one split of a store: ranges of the store's rows, numbered one after another."""

    name: str  # name of the source
    store: Tokens
    first: np.ndarray  # (P,) int64: first row of each range, ascending
    counts: np.ndarray  # (P,) int64: number of rows of each range, above 0 if there are several
    share: float = 0.0  # fraction of the store's rows that is held out; 0: none, or a separate validation part
    plan: PackedRows | None = None  # pack plan that defines the rows; None: consecutive windows of T tokens

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _before(self) -> np.ndarray:
        return np.cumsum(self.counts) - self.counts

    def find_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Map rows of the split (N,) to rows of the store (N,)."""
        if len(self.first) == 1:
            return self.first[0] + numbers
        stretch = np.searchsorted(self._before, numbers, side="right") - 1
        return self.first[stretch] + numbers - self._before[stretch]

    def compute_reach(self, count: int) -> int:
        """Compute the maximum number of store rows that `count` adjacent rows of the split span."""
        lasts = self._before + self.counts - 1  # adjacent rows that begin with the last row of a range span most
        ends = np.minimum(lasts + count - 1, self.count - 1)
        return (
            count if len(self.first) == 1 else max(count, int((self.find_rows(ends) - self.find_rows(lasts)).max()) + 1)
        )

    def get_identity(self) -> list[str | float]:
        """Return the JSON value that determines the rows: [name, share, store identity, plan identity if any]."""
        plan = [] if self.plan is None else [self.plan.plan.compute_identity()]
        return [self.name, self.share or 0, self.store.identity, *plan]

    def holds(self, identity: list[str | float]) -> bool:
        """Return whether this part has the identity, or had it before shards were appended.

        Raises UserError if only the held-out fraction differs.
        """
        if identity == self.get_identity():
            return True
        if len(identity) != len(self.get_identity()):
            return False
        name, share, store, *plan = identity
        shards = self.store.manifest.match_prefix(str(store)) if isinstance(self.store, StoreTokens) else None
        if name != self.name or (shards is None and store != self.store.identity):
            return False
        if self.plan is not None and plan != [self.plan.plan.compute_identity(shards)]:
            return False
        if share != self.share:
            raise UserError(
                f"the validation split of {self.store.name} has changed since the run began.",
                f"The held-out fraction (data.validation_fraction) was {share:g} and is now {self.share:g}, so "
                "training and validation sequences would mix. (0: no held-out sequences, or the store has a folder "
                f"{VALIDATION}.)",
                f"Restore data.validation_fraction={share:g} and the folder {VALIDATION}, or start a new run:  "
                "train from=RUN_DIR",
            )
        return True


def count_held_out(up_to: np.ndarray, share: float) -> np.ndarray:
    """Count the rows held out at the end of each shard, (S,); `up_to` (S,): cumulative rows at the end of each shard.

    The count of a shard depends only on the shards up to it, so that no row changes its split when shards are appended.
    """
    if not share:
        return np.zeros_like(up_to)
    totals = np.maximum(np.floor(share * up_to + 0.5).astype(np.int64), up_to > 0)
    return np.diff(totals, prepend=0)


def open_split_parts(
    name: str,
    folder: str,
    split: Split,
    sequence_length: int,
    validation_fraction: float,
    option: str,
    vocab_size: int | None = None,
    best_fit: bool = False,
    column: str | None = None,
    cache: RemoteCache | None = None,
) -> list[SplitRows]:
    """Open the rows of a split; with validation_fraction 1, the rows of the store and of its validation part.

    Raises UserError like `open_split_rows`, and if the validation part is missing.
    """
    how = (option, vocab_size, best_fit, column, cache)
    one = open_split_rows(name, folder, split, sequence_length, validation_fraction, *how)
    held_out = one.store.manifest.held_out if isinstance(one.store, StoreTokens) else False
    if validation_fraction != 1 or held_out is False or not (held_out or _has_validation_folder(folder, cache)):
        return [one]
    rest = open_split_rows(f"{name}/{VALIDATION}", folder, "validation", sequence_length, 0, *how, may_be_short=True)
    return [one, rest] if rest.count else [one]


def _has_validation_folder(folder: str, cache: RemoteCache | None) -> bool:
    """Return whether a store has a folder with its validation part."""
    if is_remote(folder):
        assert cache is not None, "options of a source name a cache"
        there = f"{folder.rstrip('/')}/{VALIDATION}"
        return Remote(there, cache.deadline).read_small_file(FILE, optional=True) is not None
    return (Path(folder).expanduser() / VALIDATION / FILE).exists()


def open_split_rows(
    name: str,
    folder: str,
    split: Split,
    sequence_length: int,
    validation_fraction: float,
    option: str,
    vocab_size: int | None = None,
    best_fit: bool = False,
    column: str | None = None,
    cache: RemoteCache | None = None,
    may_be_short: bool = False,
) -> SplitRows:
    """Open one split of the store at `folder`, the value of `option`.

    vocab_size  vocabulary of the model; if given, `folder` may be in an external format
    best_fit    use the rows of the store's pack plan, instead of consecutive windows of T tokens
    column      column with the tokens, in external formats
    cache       shard cache, for a store behind a URL
    may_be_short  allow a split without a single sequence
    Raises UserError if the store cannot be read, is too short for one sequence, or has no plan.
    """
    root = Path(folder).expanduser()
    held_out = root / VALIDATION
    whole_set = validation_fraction == 1  # the complete store is the validation set, even if it has a validation folder
    apart = not whole_set and _has_validation_folder(folder, cache)
    store: Tokens
    if is_remote(folder):
        assert cache is not None, "options of a source name a cache"
        plans = (name_plan_file(sequence_length),) if best_fit else ()
        there = f"{folder.rstrip('/')}/{VALIDATION}"
        store = RemoteTokens(
            there if apart and split == "validation" else folder, cache.open_file_cache(), cache.deadline, plans
        )
    elif vocab_size is not None and is_external(root):
        store = open_tokens(root, vocab_size, column)
    else:
        store = LocalTokens(held_out if apart and split == "validation" else root)
    if not apart and not whole_set and isinstance(store, StoreTokens):
        check_without_validation(store.manifest, folder)
    if apart and split == "train" and isinstance(store, StoreTokens) and not store.manifest.held_out:
        raise explain_stray_validation(folder)
    plan = None
    if best_fit:
        if not isinstance(store, StoreTokens):
            raise UserError(
                f"{option}={folder} does not support data.packing=best_fit.",
                "Only a store of `gangline data prepare` has a pack plan.",
                "data.packing=concatenate",
            )
        plan = PackedRows(store, sequence_length)
    # A row belongs to the shard of its last token, so that appended shards do not change the rows of earlier shards.
    up_to = plan.up_to if plan is not None else np.maximum(0, store.compute_ends() - 1) // sequence_length
    share = 0.0 if apart else validation_fraction
    held_counts = count_held_out(up_to, share)
    first, counts = np.concatenate([[0], up_to[:-1]]), np.diff(up_to, prepend=0) - held_counts
    if apart or not share:  # all rows belong to this split, or, if none are held out, to training
        first, counts = np.array([0]), up_to[-1:] if apart or split == "train" else np.array([0])
    elif split == "validation":
        first, counts = first + counts, held_counts
    some = counts > 0
    if not some.any() and not may_be_short:
        whole = int(up_to[-1])
        raise UserError(
            f"{option}={folder} is too short.",
            f"The store has {whole} sequences of {sequence_length} tokens, and the {split} split has 0 sequences: "
            f"`prepare` held out no documents, and data.validation_fraction={validation_fraction}."
            if whole
            else f"The {split} split has {store.total} tokens; one sequence needs {sequence_length + 1}.",
            "Prepare more text, or reduce batch.sequence_length"
            + (", or change data.validation_fraction, or disable validation: validate.every=null." if whole else "."),
        )
    return SplitRows(name, store, first[some], counts[some], share, plan)
