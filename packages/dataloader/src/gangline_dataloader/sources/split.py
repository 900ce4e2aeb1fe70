"""Which sequences of a store are of which split: what was held out when it was prepared, else its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gangline import UserError
from gangline_dataloader.packing.pack_plan import PackedRows, plan_of
from gangline_dataloader.store.foreign import is_foreign, opened
from gangline_dataloader.store.local import LocalTokens
from gangline_dataloader.store.manifest import FILE, VALIDATION
from gangline_dataloader.store.remote.cache import RemoteCache
from gangline_dataloader.store.remote.fetch import Remote
from gangline_dataloader.store.remote.tokens import RemoteTokens, is_remote
from gangline_dataloader.store.stored import StoreTokens
from gangline_dataloader.store.tokens import Tokens

if TYPE_CHECKING:
    from gangline.data import Split


@dataclass(frozen=True)
class SplitRows:
    """The sequences of one split of a store: `count` of them, from row `first` on."""

    name: str  # of the source
    store: Tokens
    first: int
    count: int
    plan: PackedRows | None = None  # what makes the rows, where they are not cut one after another

    def identity(self) -> list[str | int]:
        """What decides its rows: JSON."""
        plan = [] if self.plan is None else [self.plan.plan.identity()]
        return [self.name, self.first, self.store.identity, *plan]

    def holds(self, identity: list[str | int]) -> bool:
        """Whether it is the part with that identity, or that with more shards behind it."""
        if identity == self.identity():
            return True
        if not isinstance(self.store, StoreTokens) or len(identity) != len(self.identity()):
            return False
        name, first, store, *plan = identity
        shards = self.store.manifest.grew_from(str(store))
        if [name, first] != [self.name, self.first] or shards is None:
            return False
        return self.plan is None or plan == [self.plan.plan.identity(shards)]


def split_rows(
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
) -> SplitRows:
    """One split of the store in `folder`, which `option` names; with a `vocab_size` it may be a file of others.

    best_fit  rows are those of the store's plan, instead of T tokens after T tokens
    column    of a table of others that holds the tokens
    cache     for a store behind a URL
    Raises UserError where it cannot be read, is too short for one sequence, or there is no plan.
    """
    root = Path(folder).expanduser()
    held_out = root / VALIDATION
    apart = (held_out / FILE).exists()
    store: Tokens
    if is_remote(folder):
        assert cache is not None, "options of a source name a cache"
        plans = (plan_of(sequence_length),) if best_fit else ()
        there = f"{folder.rstrip('/')}/{VALIDATION}"
        apart = Remote(there, cache.deadline).small(FILE, optional=True) is not None
        store = RemoteTokens(there if apart and split == "validation" else folder, cache.files(), cache.deadline, plans)
    elif vocab_size is not None and is_foreign(root):
        store = opened(root, vocab_size, column)
    else:
        store = LocalTokens(held_out if apart and split == "validation" else root)
    plan = None
    if best_fit:
        if not isinstance(store, StoreTokens):
            raise UserError(
                f"{option}={folder} cannot be packed.",
                "A plan lies beside a store that `gangline data prepare` made.",
                "data.packing=concatenate",
            )
        plan = PackedRows(store, sequence_length)
    first, count = 0, store.rows(sequence_length) if plan is None else plan.count
    if not apart:
        kept = count - (max(1, round(count * validation_fraction)) if validation_fraction else 0)
        first, count = (kept, count - kept) if split == "validation" else (0, kept)
    if count < 1:
        whole = store.rows(sequence_length) if plan is None else plan.count
        raise UserError(
            f"{option}={folder} is too short.",
            f"It has {whole} sequences of {sequence_length} tokens, and {split} none of them: "
            f"nothing was held out when it was made, and data.validation_fraction={validation_fraction}."
            if whole
            else f"Its {split} part has {store.total} tokens; one sequence needs {sequence_length + 1}.",
            "Give it more text, or a smaller batch.sequence_length"
            + (", or hold out otherwise: data.validation_fraction, and validate.every=null." if whole else "."),
        )
    return SplitRows(name, store, first, count, plan)
