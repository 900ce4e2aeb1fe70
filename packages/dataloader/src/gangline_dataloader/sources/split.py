"""Which sequences of a store are of which split: what was held out when it was prepared, else of each shard its end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gangline import UserError
from gangline_dataloader.packing.pack_plan import PackedRows, name_plan_file
from gangline_dataloader.store.foreign import is_foreign, open_tokens
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
    """The sequences of one split of a store: stretches of its rows, numbered one behind another."""

    name: str  # of the source
    store: Tokens
    first: np.ndarray  # (P,) int64: the row that each stretch begins with, ascending
    counts: np.ndarray  # (P,) int64: how many it has; more than none, where there are several
    share: float = 0.0  # of the store's rows are held out; 0 where none are, or they have a folder of their own
    plan: PackedRows | None = None  # what makes the rows, where they are not cut one after another

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _before(self) -> np.ndarray:
        return np.cumsum(self.counts) - self.counts

    def find_rows(self, numbers: np.ndarray) -> np.ndarray:
        """(N,) the rows of the store that the split's rows number (N,) are."""
        if len(self.first) == 1:
            return self.first[0] + numbers
        stretch = np.searchsorted(self._before, numbers, side="right") - 1
        return self.first[stretch] + numbers - self._before[stretch]

    def compute_reach(self, count: int) -> int:
        """Over how many rows of the store `count` of the split's in a row reach at most."""
        lasts = self._before + self.counts - 1  # what begins there reaches furthest
        ends = np.minimum(lasts + count - 1, self.count - 1)
        return (
            count if len(self.first) == 1 else max(count, int((self.find_rows(ends) - self.find_rows(lasts)).max()) + 1)
        )

    def get_identity(self) -> list[str | float]:
        """What decides its rows: JSON."""
        plan = [] if self.plan is None else [self.plan.plan.compute_identity()]
        return [self.name, self.share or 0, self.store.identity, *plan]

    def holds(self, identity: list[str | float]) -> bool:
        """Whether it is the part with that identity, or that with more shards behind it.

        Raises UserError where it would be, but for what is held out.
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
                f"other rows of {self.store.name} would be held out than this run began with.",
                f"It began with {share:g} of them held out, and now it would be {self.share:g} (0 also where the "
                f"store has a folder {VALIDATION} of what is held out): one part would leak into the other.",
                f"data.validation_fraction={share:g}, and the folder {VALIDATION} as it was; "
                "or a new run:  train from=RUN_DIR",
            )
        return True


def count_held_out(up_to: np.ndarray, share: float) -> np.ndarray:
    """(S,) how many rows at the end of each shard are held out; the shards up to it have `up_to` (S,) rows.

    A shard's part is a function of those before it alone, so that no row changes its side when more are put behind.
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
    """Open split rows and, where a whole store is a validation set, behind it what prepare held out of the store.

    Raises UserError as `open_split_rows`, and where the part that was held out is missing.
    """
    how = (option, vocab_size, best_fit, column, cache)
    one = open_split_rows(name, folder, split, sequence_length, validation_fraction, *how)
    held_out = one.store.manifest.held_out if isinstance(one.store, StoreTokens) else False
    if validation_fraction != 1 or held_out is False or not (held_out or _has_validation_folder(folder, cache)):
        return [one]
    rest = open_split_rows(f"{name}/{VALIDATION}", folder, "validation", sequence_length, 0, *how, may_be_short=True)
    return [one, rest] if rest.count else [one]


def _has_validation_folder(folder: str, cache: RemoteCache | None) -> bool:
    """Whether what was held out of a store has a folder of its own."""
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
    """One split of the store in `folder`, which `option` names; with a `vocab_size` it may be a file of others.

    best_fit  rows are those of the store's plan, instead of T tokens after T tokens
    column    of a table of others that holds the tokens
    cache     for a store behind a URL
    may_be_short  no sequence is no mistake
    Raises UserError where it cannot be read, is too short for one sequence, or there is no plan.
    """
    root = Path(folder).expanduser()
    held_out = root / VALIDATION
    whole_set = validation_fraction == 1  # all of it is a validation set, whatever was held out of it
    apart = not whole_set and _has_validation_folder(folder, cache)
    store: Tokens
    if is_remote(folder):
        assert cache is not None, "options of a source name a cache"
        plans = (name_plan_file(sequence_length),) if best_fit else ()
        there = f"{folder.rstrip('/')}/{VALIDATION}"
        store = RemoteTokens(
            there if apart and split == "validation" else folder, cache.open_file_cache(), cache.deadline, plans
        )
    elif vocab_size is not None and is_foreign(root):
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
                f"{option}={folder} cannot be packed.",
                "A plan lies beside a store that `gangline data prepare` made.",
                "data.packing=concatenate",
            )
        plan = PackedRows(store, sequence_length)
    # A row is of the shard that its last token is in: those of the first shards are then the rows that they had alone.
    up_to = plan.up_to if plan is not None else np.maximum(0, store.compute_ends() - 1) // sequence_length
    share = 0.0 if apart else validation_fraction
    held_counts = count_held_out(up_to, share)
    first, counts = np.concatenate([[0], up_to[:-1]]), np.diff(up_to, prepend=0) - held_counts
    if apart or not share:  # all of it is of this split, or, of what has none held out, of training
        first, counts = np.array([0]), up_to[-1:] if apart or split == "train" else np.array([0])
    elif split == "validation":
        first, counts = first + counts, held_counts
    some = counts > 0
    if not some.any() and not may_be_short:
        whole = int(up_to[-1])
        raise UserError(
            f"{option}={folder} is too short.",
            f"It has {whole} sequences of {sequence_length} tokens, and {split} none of them: "
            f"nothing was held out when it was made, and data.validation_fraction={validation_fraction}."
            if whole
            else f"Its {split} part has {store.total} tokens; one sequence needs {sequence_length + 1}.",
            "Give it more text, or a smaller batch.sequence_length"
            + (", or hold out otherwise: data.validation_fraction, and validate.every=null." if whole else "."),
        )
    return SplitRows(name, store, first[some], counts[some], share, plan)
