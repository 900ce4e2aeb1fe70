"""The plan of a `prepare` call, in a file below the store, so that any process on any machine can do a work item.

    OUT/.prepare/plan.json             inputs, options, shards that the store had before, and the identity of the folder
                                       `validation` once this call makes it
                 task-000000.*         a task's documents (`prepare.task`); with --append, the first tasks are the
                                       shards that the store already has
                 kept.npy choice.json  kept documents, and the documents of each shard (`prepare.choice`)
                 shards/               new shards, each with a JSON note (`prepare.assemble`)

The shards are moved into the store at the end, and its manifest is written last: until then the store is unchanged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline_dataloader.prepare.inputs import Input, plan_tasks
from gangline_dataloader.prepare.settings import BESIDE, RULES_VERSION, Settings
from gangline_dataloader.store import manifest as manifests
from gangline_dataloader.store.durable import replace_json
from gangline_dataloader.store.manifest import FILE, VALIDATION, Manifest

WORK = ".prepare"  # working folder below the store
SPLITS = ("", VALIDATION)  # folders of the train and validation split, relative to the store; each is a store
PLAN = "plan.json"
SUBMITTED = "submitted.json"  # ids of the Slurm jobs that execute the plan
FILES_OF_TOKENIZER = ("tokenizer.json", *BESIDE)
# files of a validation folder whose preparation was killed before its manifest was written
_FILE_OF_PART = re.compile(r"shard-\d+(\.ends|\.loss)?\.npy|\..*\.part")
MADE = "validation"  # key in PLAN: identity of the folder `validation` that the call makes, or null


@dataclass(frozen=True)
class Base:
    """The state of a store before documents are appended.

    digest  hash of its manifest file; "" for a new store
    shards  folder below the store -> number of shards
    """

    digest: str = ""
    shards: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))


@dataclass(frozen=True)
class PreparePlan:
    """The plan of a `gangline data prepare` call. identity: hash of inputs and options, `Settings.compute_identity`."""

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
        """Folder and number of each shard that the store already has."""
        return [(split, number) for split in SPLITS for number in range(self.base.shards[split])]

    @cached_property
    def dealt(self) -> list[list[Input]]:
        """Input files of each task; these tasks follow the tasks of the known shards."""
        return plan_tasks(self.files, self.settings.task_bytes)

    def read_previous(self, split: str) -> Manifest | None:
        """Read the manifest as it was before this call, without shards that a killed call appended; None: new store."""
        count = self.base.shards[split]
        return manifests.read(self.store / split).take_first_shards(count) if count else None

    def claim_validation(self, identity: str) -> None:
        """Record that this call makes the folder `validation`, and the identity of that part.

        Raises UserError if a folder `validation` exists that this call did not make.
        """
        folder = self.store / VALIDATION
        part_identity = _read_content(self.work).get(MADE)
        if os.path.lexists(folder) and not (part_identity and _is_part(folder, part_identity)):
            raise _explain_occupied(folder)
        replace_json(self.work / PLAN, {**_read_content(self.work), MADE: identity})

    def write(self) -> None:
        """Write the plan into the working folder, which is emptied first if it belongs to another call."""
        part_identity = None
        if _read_same_base(self.work, self) is not None:
            part_identity = _read_content(self.work).get(MADE)
        elif self.work.exists():
            if content := _read_content(self.work):  # from here on, the other call can no longer continue
                replace_json(self.work / PLAN, {**content, "identity": None})
            if _is_unfinished_part(self.store):
                (self.store / VALIDATION / FILE).unlink(missing_ok=True)
                shutil.rmtree(self.store / VALIDATION)
            shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True, exist_ok=True)
        for path in self.work.rglob(".*.part"):  # files of a call that ended, which take space on a full disk
            path.unlink(missing_ok=True)
        content = {
            "identity": self.identity,
            "settings": asdict(self.settings),
            "engine": self.engine,
            "base": asdict(self.base),
            "rules": RULES_VERSION,
            MADE: part_identity,
            "files": [list(vars(file).values()) for file in self.files],  # without keys, because there may be many
        }
        replace_json(self.work / PLAN, content)


def begin_plan(
    store: Path, identity: str, settings: Settings, engine: str, files: Sequence[Input], append: bool
) -> PreparePlan:
    """Write the plan of a call and return it. If an equal call was interrupted, the plan has the base of that call.

    Raises UserError if the store lacks its validation part, or has a folder `validation` that is not its own.
    """
    base, unfinished = Base(), _is_unfinished_part(store)
    if append:
        there = [""] if unfinished else [split for split in SPLITS if _is_complete(store / split)]
        if there == [""]:
            manifests.check_without_validation(manifests.read(store), str(store))
        shards = {split: len(manifests.read(store / split).shards) for split in there}
        base = Base(_compute_digest(store), {**base.shards, **shards})
    plan = PreparePlan(store, identity, settings, engine, files, base)
    if (earlier := _read_same_base(plan.work, plan)) is not None:  # the validation part may have grown already
        plan = PreparePlan(store, identity, settings, engine, files, earlier)
    if not plan.base.shards[VALIDATION] and not unfinished and os.path.lexists(store / VALIDATION):
        holds_out = settings.validation > 0 or any(file.split == VALIDATION for file in files)
        if holds_out or _is_complete(store / VALIDATION):
            raise _explain_occupied(store / VALIDATION)
    plan.write()
    return plan


def forget(store: Path, identities: Sequence[str]) -> None:
    """Remove the working folder of a killed call, if the call has one of `identities` or an unreadable plan."""
    try:
        other = json.loads((store / WORK / PLAN).read_bytes())["identity"] not in identities
    except (OSError, ValueError, KeyError, TypeError):
        other = False
    if not other:
        shutil.rmtree(store / WORK, ignore_errors=True)


def read(store: Path, identity: str) -> PreparePlan:
    """Read the plan with this identity that `begin_plan` wrote, also in another process."""
    return _read(store, identity, (store / WORK / PLAN).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _read(store: Path, identity: str, modified: int) -> PreparePlan:
    content = json.loads((store / WORK / PLAN).read_bytes())
    assert content["identity"] == identity, "another call has replaced this plan"
    files = [Input(*file) for file in content["files"]]
    return PreparePlan(
        store, identity, Settings.from_record(content["settings"]), content["engine"], files, Base(**content["base"])
    )


def _read_same_base(work: Path, plan: PreparePlan) -> Base | None:
    """Read the recorded base of an interrupted call; None unless it has the identity, store and rules of `plan`."""
    try:
        content: dict[str, Any] = json.loads((work / PLAN).read_bytes())
        base = Base(**content["base"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = content["identity"] == plan.identity and base.digest == plan.base.digest
    same = same and (content.get("rules") == RULES_VERSION or not plan.settings.filters)
    return base if same and base.shards.keys() == plan.base.shards.keys() else None


def _read_content(work: Path) -> dict[str, Any]:
    """Read the JSON of the plan on the disk; {} if there is none."""
    try:
        content = json.loads((work / PLAN).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_unfinished_part(store: Path) -> bool:
    """Return whether the folder `validation` is a part that a killed call began, not in the store's manifest yet."""
    content = _read_content(store / WORK)
    base, part_identity = content.get("base"), content.get(MADE)
    before = base.get("digest") if isinstance(base, dict) else None
    unfinished = before == (_compute_digest(store) if _is_complete(store) else "")
    return unfinished and isinstance(part_identity, str) and _is_part(store / VALIDATION, part_identity)


def _is_part(folder: Path, identity: str) -> bool:
    """Return whether a folder holds the validation part with this identity, or files of a part without a manifest."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    if not _is_complete(folder):
        return all(_FILE_OF_PART.fullmatch(name) or name in FILES_OF_TOKENIZER for name in os.listdir(folder))
    try:
        content = json.loads((folder / FILE).read_bytes())
        return manifests.parse(content, str(folder / FILE)).compute_identity() == identity
    except (OSError, ValueError, RecursionError, UserError):
        return False


def _explain_occupied(folder: Path) -> UserError:
    return UserError(
        f"{folder} exists, but is not the validation part of the store {folder.parent}.",
        "The held-out documents are written to a new folder of that name.",
        "Move the folder elsewhere, and type the same command.",
    )


def _is_complete(folder: Path) -> bool:
    return (folder / FILE).exists()


def _compute_digest(store: Path) -> str:
    return blake2b((store / FILE).read_bytes(), digest_size=16).hexdigest()
