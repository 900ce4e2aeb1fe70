"""Run directory: written completely before the launch, and read by every worker.

``config.yaml`` is written last and ends with YAML's end marker: a directory in which it is missing or truncated is
incomplete and not a run. Torch-free.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from gangline.checkpoint.id import CheckpointId
from gangline.config.paths import resolve_paths
from gangline.config.schema import Run
from gangline.config.serial import from_dict, to_dict
from gangline.config.yaml_files import PlainDumper, load_yaml
from gangline.errors import UserError
from gangline.plugin.hooks import LISTS
from gangline.plugin.registry import installed
from gangline.run import provenance
from gangline.run.lock import RunLock, explain_unwritable
from gangline.run.redaction import refuse_secrets
from gangline.storage.files import read_regular, write_whole

END = "..."  # YAML's end-of-document marker: the last line of a complete config.yaml


class RunDirectory:
    """Directory of one run, from the class methods `create`, `open` or `meet`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = RunLock(self.path)
        self._made: list[Path] = []  # set by `create`: new directories among the path and its parents
        self._replaced: dict[Path, str] = {}  # set by `rewrite`: file -> former content
        self._begun = 0
        self._handed_over = False

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    config = property(lambda self: self.path / "config.yaml")
    parts = property(lambda self: self.path / "parts.json")
    provenance = property(lambda self: self.path / "provenance.json")
    attempts = property(lambda self: self.path / "attempts.jsonl")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    checkpoints = property(lambda self: self.path / "checkpoints")
    logs = property(lambda self: self.path / "logs")
    tensorboard = property(lambda self: self.path / "tensorboard")

    # --- creation and opening ----------------------------------------------------------------------------------------

    @classmethod
    def create(cls, run: Run, argv: Sequence[str] = (), job: str | None = None) -> RunDirectory:
        """Create and lock a directory for `run`. job: name of the job, by which its restart is recognized.

        Raises UserError if the directory cannot be written, already holds a run, or is in use by another `train`.
        """
        directory = cls._make(run)
        directory.lock()
        try:
            if directory.config.exists():
                place = shlex.quote(str(directory.path))
                raise UserError(
                    f"{directory.path} already holds a run.",
                    f"To continue this run:  train resume={place}",
                    f"To start a new run with its configuration (new weights):  train from={place}",
                )
            directory._write(run, argv, job, changed={})
        except BaseException:
            directory.unlock()
            directory.discard()
            raise
        return directory

    @classmethod
    def _make(cls, run: Run) -> RunDirectory:
        refuse_secrets(to_dict(run))
        directory = cls(run.job.dir or make_fresh(run.job.name))
        try:
            directory._made = [path for path in (directory.path, *directory.path.parents) if not path.exists()]
            directory.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            directory._remove_parents()
            raise explain_unwritable(directory.path, error) from error
        return directory

    def discard(self) -> bool:
        """Delete the directory of a refused run, if `create` made it and no rank was about to train.

        Returns whether the directory was deleted.
        """
        if self._handed_over:
            return False
        if self.path not in self._made or "data" in self.read_provenance() or self._lock.is_held_by_others():
            return False
        self.unlock()
        shutil.rmtree(self.path, ignore_errors=True)
        self._remove_parents()
        return True

    def _remove_parents(self) -> None:
        """Remove the parent directories that were created for this run, such as runs/, if they are empty."""
        with suppress(OSError):
            for parent in self._made[1:]:
                parent.rmdir()

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open the directory of an existing run. Raises UserError if it is missing or incomplete."""
        directory = cls(path)
        if not directory.path.is_dir():
            raise UserError(f"there is no run directory {directory.path}.", _list_siblings(directory.path))
        if CheckpointId.parse(directory.path.name) and not directory.config.exists():
            run_dir, name = next(p for p in directory.path.parents if p.name != "checkpoints"), directory.path.name
            raise UserError(
                f"{directory.path} is a checkpoint, not a run directory.",
                f"To continue the run from its newest checkpoint:  train resume={run_dir}",
                f"To start a new run from this checkpoint:  train from={run_dir} weights={run_dir}/{name}",
            )
        if not directory.config.exists():
            raise UserError(
                f"{directory.path} is not a complete run directory: config.yaml is missing.",
                "train writes config.yaml last, so no step was trained in this directory. Start the run again.",
                _list_siblings(directory.path),
            )
        directory._read_content()
        return directory

    def run(self) -> Run:
        """Return the run that config.yaml describes; `run.dir` is the current path of the directory."""
        run = from_dict(self._read_content())
        run.job.dir = str(self.path)
        return run

    def read_content(self) -> dict[str, Any]:
        """Return the content of config.yaml as written, with references to the environment and the user's `run.dir`."""
        return self._read_content()

    def rewrite(self, run: Run, argv: Sequence[str] = (), changed: dict[str, Any] | None = None) -> None:
        """Replace the configuration of a resumed run by the changed one, and add the new start to provenance.json."""
        refuse_secrets(to_dict(run))
        run_dir = self._read_content().get("run", {}).get("dir")
        self._replaced = {path: read_regular(path).decode() for path in (self.parts, self.config) if path.exists()}
        self._begun = self._count_start_bytes()
        self._write(run, argv, None, changed or {}, run_dir)

    def put_back(self) -> None:
        """Restore the files from before `rewrite` after a refused configuration, unless ranks have resumed the run."""
        if self._handed_over:
            return
        if self._replaced and self._count_start_bytes() == self._begun and not self._lock.is_held_by_others():
            for path, text in self._replaced.items():
                write_whole(path, text)

    def _count_start_bytes(self) -> int:
        """Return the size of attempts.jsonl in bytes, which grows as soon as ranks have resumed the run."""
        return self.attempts.stat().st_size if self.attempts.exists() else 0

    # --- locks -------------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock the directory for the life of this process. Raises UserError if another process holds the lock."""
        self._lock.take()

    def share(self, waits: bool = True) -> str:
        """Share the directory with the other nodes of one job; return the job's name. See `RunLock.share`."""
        return self._lock.share(waits)

    def end_job(self) -> None:
        """Mark the job as over, so that nodes that start later wait for the next job of the run."""
        self._lock.end_job()

    def unlock(self) -> None:
        """Unlock the directory."""
        self._lock.release()

    def hand_over(self) -> None:
        """Unlock the directory for a job elsewhere: errors here no longer delete it or restore its configuration."""
        self._handed_over = True
        self.unlock()

    def take_back(self) -> None:
        """Take the directory back when the other job is over, so that `discard` and `put_back` have an effect again."""
        self._handed_over = False

    def go_on(self, run: Run, argv: Sequence[str] = (), changed: dict[str, Any] | None = None) -> None:
        """Share the directory; a job's first node calls `rewrite`. Raises UserError if a later node's run differs."""

        def enter(first: bool) -> None:
            if first:
                self.rewrite(run, argv, changed)
            elif difference := _explain_difference(self._read_typed(), resolve_paths(run)):
                self.unlock()
                raise UserError(
                    f"a job with another configuration is running in {self.path}: {difference}.",
                    f"To join the job:  train resume={shlex.quote(str(self.path))}, with the first node's overrides.",
                    "To change the run, end the job first.",
                )

        self._lock.share(entered=enter)

    @classmethod
    def meet(cls, run: Run, argv: Sequence[str] = (), job: str | None = None) -> RunDirectory:
        """Create the directory, shared as by `share`, or join the equal run that another node or earlier start created.

        Raises UserError if the directory cannot be written or holds a different run.
        """
        directory = cls._make(run)
        directory.share()
        with directory._lock.enter_alone():
            if not directory.config.exists():
                directory._write(run, argv, job, changed={})
            elif difference := _explain_difference(directory._read_typed(), resolve_paths(run)):
                raise UserError(
                    f"{directory.path} already holds another run: {difference}.",
                    "To continue that run:  train resume=... and the options to change.",
                    "To start a new run, choose another directory:  train run.dir=...",
                )
            else:
                directory._made = []
        return directory

    # --- provenance, versions and configuration ----------------------------------------------------------------------

    def add_provenance(self, key: str, value: Any) -> None:
        """Add a fact about the origin of this run to provenance.json, such as the fingerprint of its data."""
        self._write_json(self.provenance, {**self.read_provenance(), key: value})

    def read_provenance(self) -> dict[str, Any]:
        """Return the content of provenance.json; `starts` is a list with an entry for each start of the run."""
        try:
            return json.loads(read_regular(self.provenance))
        except (FileNotFoundError, ValueError):  # a kill may have truncated the file
            return {}

    def list_changed_parts(self) -> list[str]:
        """Return lines that name the parts whose version has changed since the run began."""
        try:
            before = _flatten(json.loads(read_regular(self.parts)))
        except (FileNotFoundError, ValueError):
            return []
        now = _flatten(find_part_versions(self.run()))
        return [
            f"{where}: {before[where]} when the run began, {now[where]} now"
            for where in sorted(before.keys() & now.keys())
            if before[where] != now[where]
        ]

    def _read_typed(self) -> dict[str, Any]:
        """Return the configuration with each value in its option's type: a user may write `nodes: 1` instead of "1"."""
        return resolve_paths(from_dict(self._read_content()))

    def _read_content(self) -> dict[str, Any]:
        try:
            text = read_regular(self.config).decode()
        except OSError as error:
            raise UserError(f"{self.config} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{self.config} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
        if not text.rstrip().endswith(f"\n{END}"):
            raise UserError(
                f"{self.config} is truncated: its last line must be '{END}'.",
                "The file was not written or copied completely. Copy the file again, or start a new run.",
            )
        try:
            content = load_yaml(text)
        except yaml.YAMLError as error:
            raise UserError(f"{self.config} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict) or not isinstance(content.get("run", {}), dict):
            raise UserError(f"{self.config} does not contain the configuration of a run.")
        return content

    def _write(
        self, run: Run, argv: Sequence[str], job: str | None, changed: dict[str, Any], run_dir: str | None = None
    ) -> None:
        content = resolve_paths(run)
        content["run"]["dir"] = run_dir if run_dir is not None else content["run"]["dir"]
        start = provenance.describe(argv, changed)
        facts = self.read_provenance()
        facts = {**facts, "job": job or facts.get("job"), "starts": [*facts.get("starts", []), start]}
        text = yaml.dump(content, Dumper=PlainDumper, sort_keys=False, explicit_end=True, allow_unicode=True, width=120)
        try:
            for folder in (self.logs, self.checkpoints):
                folder.mkdir(exist_ok=True)
            self._write_json(self.parts, find_part_versions(run))
            self._write_json(self.provenance, facts)
            write_whole(self.config, text)
        except OSError as error:
            raise explain_unwritable(self.path, error) from error

    def _write_json(self, path: Path, content: Any) -> None:
        write_whole(path, json.dumps(content, indent=2) + "\n")


def find_part_versions(run: Run) -> dict[str, Any]:
    """Return group -> {"part", "distribution", "version"}; a list of such dicts for a group with many parts."""

    def describe_part(config: Any) -> dict[str, str]:
        offer = installed().find_part(config)
        return {"part": offer.part.name, "distribution": offer.distribution, "version": offer.version}

    versions: dict[str, Any] = {group: [] for group in LISTS}
    for path, config in run.iterate_parts():
        group, _, name = path.partition(".")
        if name and group in LISTS:
            versions[group].append(describe_part(config))
        else:
            versions[path] = describe_part(config)
        for field in installed().find_part(config).part.opens:
            versions[f"{path}/{field}"] = describe_part(getattr(config, field))
    return versions


def holds_checkpoint(run: Run) -> bool:
    """Return whether the weights come from a checkpoint, in the run directory or by `run.weights`.

    Checkpoints of the run outside of the run directory are ignored.
    """
    if run.job.weights is not None:
        return True
    if run.job.dir is None:
        return False
    folder = RunDirectory(run.job.dir).checkpoints
    return folder.is_dir() and any(CheckpointId.parse(entry.name) for entry in folder.iterdir())


def make_fresh(name: str) -> Path:
    """Return a new path runs/<date>-<time>-<name>, with a number appended if the path exists."""
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}"
    path, count = stem, 1
    while path.exists():
        count += 1
        path = stem.with_name(f"{stem.name}-{count}")
    return path


def _flatten(parts: dict[str, Any]) -> dict[str, str]:
    rows = {}
    for group, entry in parts.items():
        for one in entry if isinstance(entry, list) else [entry]:
            rows[f"{group}={one['part']}"] = f"{one['distribution']} {one['version']}"
    return rows


def _list_siblings(path: Path) -> str:
    """Return a line with the newest runs in the parent folder of `path`, else in runs/; if none exist, say so."""
    for folder in (path.parent, Path("runs")):
        try:
            runs = [entry for entry in folder.iterdir() if (entry / "config.yaml").exists()]
        except OSError:
            continue
        if runs:
            newest = sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True)[:5]
            return f"Runs in {folder}: {', '.join(str(run) for run in newest)}."
    return "There are no runs in this folder or in runs/."


def _explain_difference(there: dict[str, Any], mine: dict[str, Any]) -> str:
    """Return a text on one option, except `run.dir`, in which two configurations differ; "" if they are equal."""
    flat = [dict(_iterate_leaves(load_yaml(yaml.dump(content, Dumper=PlainDumper)))) for content in (there, mine)]
    for name in flat[0].keys() | flat[1].keys():
        values = [content.get(name) for content in flat]
        if values[0] != values[1] and name != "run.dir":
            return f"{name} is {values[0]} in the directory and {values[1]} in this command"
    return ""


def _iterate_leaves(content: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from _iterate_leaves(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value
