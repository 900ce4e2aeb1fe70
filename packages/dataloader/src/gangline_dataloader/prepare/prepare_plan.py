"""What is to be done, in a file below the store, so that any process on any machine can take a part of it.

    OUT/.prepare/plan.json             inputs, options, and what the store held before
                 task-000000.*         a task's documents (`prepare.task`); the first tasks are the shards of the store
                                       that more is put behind
                 kept.npy choice.json  which documents are kept, and how they are cut into shards (`prepare.choice`)
                 shards/               new shards, each with a note (`prepare.assemble`)

The shards get their names in the store at the end, its manifest last: until then the store is what it was.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gangline_dataloader.prepare.inputs import Input, tasks
from gangline_dataloader.prepare.settings import Settings
from gangline_dataloader.store import manifest as manifests
from gangline_dataloader.store.durable import replace_json
from gangline_dataloader.store.manifest import FILE, VALIDATION, Manifest

WORK = ".prepare"  # the folder of what is under way
SPLITS = ("", VALIDATION)  # folders below the store, each a store of its own
PLAN = "plan.json"
SUBMITTED = "submitted.json"  # jobs of a cluster that are to carry it out


@dataclass(frozen=True)
class Base:
    """What a store held before more is put behind it.

    digest  of its manifest's file
    shards  folder below the store -> how many it had
    """

    digest: str = ""
    shards: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))


@dataclass(frozen=True)
class PreparePlan:
    """One call of `gangline data prepare`. identity: a hash of the inputs and options (`Settings.identity`)."""

    store: Path
    identity: str
    settings: Settings
    engine: str
    files: Sequence[Input]
    base: Base

    @property
    def work(self) -> Path:
        return self.store / WORK

    @property
    def known(self) -> list[tuple[str, int]]:
        """The shards that are there: folder and number of each."""
        return [(split, number) for split in SPLITS for number in range(self.base.shards[split])]

    @cached_property
    def dealt(self) -> list[list[Input]]:
        """The files of each task behind those of known shards."""
        return tasks(self.files, self.settings.task_bytes)

    def before(self, split: str) -> Manifest | None:
        """The manifest of what was there, without what a killed call may have put behind it."""
        count = self.base.shards[split]
        return manifests.read(self.store / split).first(count) if count else None

    def write(self) -> None:
        """Begin: the folder of what is under way, emptied where it was of another call."""
        if _same(self.work, self) is None:
            shutil.rmtree(self.work, ignore_errors=True)
            if not self.base.shards[""]:
                shutil.rmtree(self.store / VALIDATION, ignore_errors=True)
        self.work.mkdir(parents=True, exist_ok=True)
        for torn in self.work.rglob(".*.part"):  # of a call that ended, which holds its room on a full disk
            torn.unlink(missing_ok=True)
        content = {
            "identity": self.identity,
            "settings": asdict(self.settings),
            "engine": self.engine,
            "base": asdict(self.base),
            "files": [list(vars(file).values()) for file in self.files],  # many
        }
        replace_json(self.work / PLAN, content)


def begun(
    store: Path, identity: str, settings: Settings, engine: str, files: Sequence[Input], append: bool
) -> PreparePlan:
    """The plan of a call, written; where the same call was interrupted, that one's."""
    base = Base()
    if append:
        if not _whole(store / VALIDATION):
            manifests.check_without_validation(manifests.read(store), str(store), (store / VALIDATION).exists())
        there = [split for split in SPLITS if _whole(store / split)]
        if manifests.read(store).held_out is False and (store / WORK / PLAN).exists():
            there = [""]  # a validation part was left by a call that was killed
        shards = {split: len(manifests.read(store / split).shards) for split in there}
        base = Base(_digest(store), {**base.shards, **shards})
    plan = PreparePlan(store, identity, settings, engine, files, base)
    if (earlier := _same(plan.work, plan)) is not None:  # what is held out may have grown already
        plan = PreparePlan(store, identity, settings, engine, files, earlier)
    plan.write()
    return plan


def forget(store: Path, identity: str) -> None:
    """Remove what a call left that was killed when all was done."""
    try:
        other = json.loads((store / WORK / PLAN).read_bytes())["identity"] != identity
    except (OSError, ValueError, KeyError, TypeError):
        other = False
    if not other:
        shutil.rmtree(store / WORK, ignore_errors=True)


def read(store: Path, identity: str) -> PreparePlan:
    """The plan that was written, in another process."""
    return _read(store, identity, (store / WORK / PLAN).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _read(store: Path, identity: str, modified: int) -> PreparePlan:
    content = json.loads((store / WORK / PLAN).read_bytes())
    assert content["identity"] == identity, "another call has begun in its place"
    files = [Input(*file) for file in content["files"]]
    return PreparePlan(
        store, identity, Settings.recorded(content["settings"]), content["engine"], files, Base(**content["base"])
    )


def _same(work: Path, plan: PreparePlan) -> Base | None:
    """The base of what is under way there, if it is of the same call on the same store."""
    try:
        content: dict[str, Any] = json.loads((work / PLAN).read_bytes())
        base = Base(**content["base"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = content["identity"] == plan.identity and base.digest == plan.base.digest
    return base if same and base.shards.keys() == plan.base.shards.keys() else None


def _whole(folder: Path) -> bool:
    return (folder / FILE).exists()


def _digest(store: Path) -> str:
    return blake2b((store / FILE).read_bytes(), digest_size=16).hexdigest()
