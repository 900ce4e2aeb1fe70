"""Stores that command-line arguments name: a run's tiers, a directory or URL of checkpoints, or one checkpoint."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gangline import BadCheckpoint, UserError
from gangline.checkpoint.id import CheckpointId
from gangline.run import attempts
from gangline_ckpt_zarr.format import zarr_json
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.stores.base import ObjectStore
from gangline_ckpt_zarr.stores.open import open_store
from gangline_ckpt_zarr.tiers.completeness import find_file_error
from gangline_ckpt_zarr.tiers.places import list_node_directories
from gangline_ckpt_zarr.tiers.stored import StoreTier

PLACES = "RUN_DIR (the newest of the run), RUN_DIR step-00000012, a checkpoint's directory, or a URL"


@dataclass(frozen=True)
class Copy:
    """One checkpoint in one tier; the root of `store` is the checkpoint itself."""

    name: str
    tier: str
    store: ObjectStore

    @cached_property
    def content(self) -> bytes:
        """Content of zarr.json, as bytes. Raises UserError if zarr.json is missing, BadCheckpoint."""
        try:
            return zarr_json.read_content(self.store)
        except FileNotFoundError:
            raise UserError(
                f"{self.store.url} is not a complete checkpoint.", f"{NAME}, which a save writes last, is missing."
            ) from None

    @cached_property
    def meta(self) -> Meta:
        """Metadata in zarr.json. Raises BadCheckpoint, also if `name` is another checkpoint id than in zarr.json."""
        return zarr_json.read(self.content, f"{self.store.url}/{NAME}", CheckpointId.parse(self.name))

    def check_sizes(self) -> Meta:
        """Return the metadata if every file has the right size; call it before allocation. Raises BadCheckpoint."""
        if why := find_file_error(self.meta, self.store.list_sizes()):
            raise BadCheckpoint("every array", None, self.store.url, why)
        return self.meta


@dataclass(frozen=True)
class Place:
    """Stores that an argument names: tiers, nearest first, perhaps with a checkpoint id; or a single checkpoint."""

    text: str
    tiers: tuple[StoreTier, ...] = ()
    id: CheckpointId | None = None
    run_dir: str | None = None
    alone: ObjectStore | None = None  # store of a single checkpoint, named by its directory or URL

    def select_tier(self, name: str | None) -> Place:
        """Return this place with only the tier `name`; None: all tiers. Raises UserError if the tier is missing."""
        if name is None:
            return self
        tiers = tuple(tier for tier in self.tiers if tier.name == name)
        if not tiers:
            names = ", ".join(tier.name for tier in self.tiers) or "none"
            raise UserError(f"--tier {name}: {self.text} does not have this tier.", f"Choices: {names}.")
        return replace(self, tiers=tiers)

    def list_ids(self) -> list[CheckpointId]:
        """Return every complete checkpoint in any of the tiers, oldest first."""
        return sorted({id for tier in self.tiers for id in tier.list_ids()})

    def find_newest(self, ids: Sequence[CheckpointId]) -> CheckpointId | None:
        """Return the checkpoint that a resume would load; without a run directory, the newest; None if `ids` is []."""
        return attempts.find_latest(self.run_dir, ids) if self.run_dir else max(ids, default=None)

    def list_copies(self) -> list[Copy]:
        """Return the copies of the named checkpoint, nearest first. Raises UserError if there is none."""
        if self.alone is not None:
            return [Copy(self.alone.url.rstrip("/").rpartition("/")[2], "", self.alone)]
        id = self.id or self.find_newest(self.list_ids())
        tiers = [tier for tier in self.tiers if id is not None and tier.has(id)]
        if id is None or not tiers:
            names = [str(each) for each in self.list_ids()]
            what = f"checkpoint {self.id}" if self.id else "complete checkpoint"
            listing = ", ".join([*names[:3], "...", *names[-3:]] if len(names) > 7 else names)
            raise UserError(f"no {what} found in {self.text}.", f"Existing checkpoints: {listing}." if names else "")
        return [Copy(str(id), tier.name, open_store(f"{tier.store.url}/{id}")) for tier in tiers]

    def copy(self) -> Copy:
        """Return the nearest copy of the named checkpoint. Raises UserError if there is none."""
        return self.list_copies()[0]


def find_places(words: Sequence[str]) -> list[Place]:
    """Return the places that arguments name, in order: an id belongs to the place before it. Raises UserError."""
    places: list[Place] = []
    for word in words:
        id = CheckpointId.parse(word)
        if id is None or os.path.isdir(word):
            places.append(_place(word))
        elif not places:
            raise UserError(
                f"no run directory is given for checkpoint {word}.", f"Type the run directory first:  RUN_DIR {word}"
            )
        elif places[-1].id is None and places[-1].alone is None:
            places[-1] = replace(places[-1], id=id)
        else:
            places.append(replace(places[-1], id=id, alone=None))
    return places


def find_place(words: Sequence[str]) -> Place:
    """Return the one place that the arguments name. Raises UserError."""
    places = find_places(words)
    if len(places) != 1:
        raise UserError(
            f"expected one checkpoint, got {len(places)}: {' '.join(words)}.", f"Name a checkpoint as {PLACES}."
        )
    return places[0]


def _place(word: str) -> Place:
    path = word.removeprefix("file://").rstrip("/") or "/"
    parent, _, name = path.rpartition("/")
    id = CheckpointId.parse(name)
    if "://" in path:
        store = open_store(path)
        if id is not None or store.exists(NAME):
            return Place(word, alone=store)
        return Place(word, (StoreTier("store", store),))
    if os.path.exists(f"{path}/config.yaml"):
        return Place(word, open_tiers(path), run_dir=path)
    if id is not None and os.path.exists(f"{parent or '.'}/config.yaml"):
        return Place(word, open_tiers(parent or "."), id, parent or ".")
    if not os.path.isdir(path):
        raise UserError(f"{word} does not exist.", f"Name a checkpoint as {PLACES}.")
    store = open_store(path)
    if id is not None or store.exists(NAME):
        return Place(word, alone=store)
    # A directory that import or average has written, in which no run has started yet.
    if os.path.isdir(f"{path}/checkpoints") and not any(map(CheckpointId.parse, os.listdir(path))):
        return _place(f"{path}/checkpoints")
    above = str(Path(path).absolute().parent)
    return Place(word, (StoreTier("disk", store),), run_dir=above if os.path.exists(f"{above}/config.yaml") else None)


def open_tiers(run_dir: str) -> tuple[StoreTier, ...]:
    """Return a run's tiers: the disk tier, the durable tier if any, and last the memory of this machine's nodes.

    Raises UserError if a part other than checkpoint=zarr wrote the run's checkpoints.
    """
    from gangline.run.directory import RunDirectory

    directory = RunDirectory.open(run_dir)
    content = directory.read_content()
    part = (content.get("parts") or {}).get("checkpoint")
    if part != "zarr":
        raise UserError(
            f"the checkpoints of {run_dir} were saved by checkpoint={part}.",
            "gangline ckpt reads only checkpoints saved by checkpoint=zarr.",
            f"To continue the run and save in zarr:  train from={shlex.quote(str(run_dir))} checkpoint=zarr",
        )
    options: dict[str, Any] = dict(content.get("checkpoint") or {})
    if any("${" in value for value in options.values() if isinstance(value, str)):
        options = vars(directory.run().checkpoint)  # resolves ${...}, such as environment variables
    tiers = [StoreTier("disk", open_store(options.get("path") or str(directory.checkpoints)), None)]
    tiers[0].keep_last, tiers[0].keep_every = options.get("keep_last"), options.get("keep_every")
    if options.get("durable"):
        keep = options.get("durable_keep_last"), options.get("durable_keep_every")
        tiers.append(StoreTier("durable", open_store(options["durable"]), options.get("durable_every"), *keep))
    if options.get("memory_every"):
        nodes = list_node_directories(run_dir)
        for place in nodes:  # last: each of several nodes has only some of the files
            name = "memory" if len(nodes) == 1 else f"memory-{place.name}"
            tiers.append(StoreTier(name, open_store(str(place))))
    return tuple(tiers)


def make_parser(verb: str, text: str, *, tier: bool = True) -> ArgumentParser:
    """Return a parser for the arguments of `gangline ckpt VERB`, with --tier if `tier`."""
    parser = ArgumentParser(prog=f"gangline ckpt {verb}", description=text)
    if tier:
        parser.add_argument("--tier", help="tier to read (memory, disk, durable); default: the nearest with a copy")
    return parser
