"""Functions that a rank runs for `CheckpointerSuite`: save and load known arrays that are sharded over a mesh."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gangline.checkpoint.base import Checkpointer, SaveFailed, SaveHandle, SaveRequest, SaveState
from gangline.checkpoint.id import CheckpointId
from gangline.config.schema import Run
from gangline.errors import BadCheckpoint
from gangline.mesh import Mesh
from gangline.plugin.registry import load as load_object
from gangline.shard import Division, Layout, Registry, Shard, name_dtype
from gangline_testkit import rank
from gangline_testkit.toys.rows_storage import split_evenly


@dataclass(frozen=True)
class CheckpointerJob:
    """Inputs to build a checkpointer on a mesh. large: rows of four additional large arrays; 0: no large arrays."""

    build: str
    run: Run
    mesh: Mesh
    token: str  # prefix of this job's keys in the job store
    large: int = 0


# --- the arrays ------------------------------------------------------------------------------------------------------


def build_registry(mesh: Mesh, large: int = 0) -> Registry:
    """Return a registry of sharded and replicated arrays.

    Matrices sharded by rows, or by rows and columns; stacked matrices (a 3-D array); replicated arrays; a scalar; an
    array that only the last pipeline stage holds.
    """
    rows = mesh.size("dp_shard")

    def cut(length: int) -> tuple[Division, ...]:
        return (Division(("dp_shard",), (split_evenly(length, rows),), rows=True),)

    both = (Division(("tp",), (split_evenly(10, mesh.size("tp")),), 1), *cut(6))
    last_stage = (("pp", mesh.size("pp") - 1),)
    layouts = {
        "model/embed.weight": Layout((11, 6), "float32", cut(11)),
        "model/wide.weight": Layout((6, 10), "float32", both),
        "model/stack": Layout((3, 4, 5), "float32", cut(12)),
        "model/norm.weight": Layout((7,), "float32"),
        "model/half": Layout((5, 3), "bfloat16", at=last_stage),
        "model/double": Layout((2, 3), "float64"),
        "model/counter": Layout((), "int64"),
        "optimizer/exp_avg/embed.weight": Layout((11, 6), "float32", cut(11)),
        "optimizer/exp_avg/stack": Layout((3, 4, 5), "float32", cut(12)),
    }
    for number in range(4 if large else 0):
        layouts[f"model/large.{number}"] = Layout((large, 256), "float32", cut(large))
    return Registry.of(mesh, layouts)


def make_values(name: str, layout: Layout, salt: int) -> torch.Tensor:
    """Return a full array whose values depend on position, name and salt; floats include nan, inf and -0.0."""
    count = 1
    for length in layout.shape:
        count *= length
    start = zlib.crc32(f"{name} {salt}".encode()) % 89
    whole = ((torch.arange(count, dtype=torch.int64) * 7 + start) % 251).to(getattr(torch, layout.dtype))
    if whole.is_floating_point() and count > 3:
        whole[1], whole[2], whole[3] = torch.nan, torch.inf, -0.0
    return whole.reshape(layout.shape)


def make_shards(registry: Registry, salt: int | None, names: Iterable[str] | None = None) -> list[Shard]:
    """Return this rank's shards of `names` (None: all arrays), filled by `make_values`; with -1 if salt is None."""
    shards = []
    for name in registry if names is None else names:
        layout = registry[name]
        whole = None if salt is None else make_values(name, layout, salt)
        for box, primary in registry.list_rank_boxes(name, rank.index):
            dtype = getattr(torch, layout.dtype)
            local = torch.full(box.shape, -1, dtype=dtype) if whole is None else whole[box.slices].clone()
            shards.append(Shard(name, layout.shape, dtype, box.offset, local, primary))
    return shards


def find_wrong(shards: Iterable[Shard], salt: int) -> list[str]:
    """Return the shards whose bits differ from `make_values`, as "name at offset"."""
    mismatches = []
    for shard in shards:
        layout = Layout(shard.global_shape, name_dtype(shard.dtype))
        want = make_values(shard.name, layout, salt)[shard.box.slices].contiguous()
        if _view_bits(shard.local) != _view_bits(want):
            mismatches.append(f"{shard.name} at {shard.offset}")
    return mismatches


def _view_bits(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def make_document(step: int, attempt: int, salt: int) -> dict[str, Any]:
    """Return a checkpoint document with every JSON type."""
    states = {
        "precision": {"scale": 65536.0, "good": None},
        "data": {"words": ["ö", "\u2603", ""], "deep": {"a": [1.5]}},
    }
    return {"step": step, "attempt": attempt, "cursor": step * 8, "seed": salt, "states": states, "flag": True}


# --- save and load ---------------------------------------------------------------------------------------------------


def open_checkpointer(job: CheckpointerJob) -> Checkpointer:
    """Return the checkpointer, opened with the job store as on a rank of a run."""
    comms = rank.make_comms(job.mesh)
    return load_object(job.build)(job.run.checkpoint, job.run, dist.PrefixStore(job.token, comms.store))  # type: ignore[arg-type]


def open_as_tool(job: CheckpointerJob) -> Checkpointer:
    """Return the checkpointer, opened without a job store as by a command on a finished run."""
    return load_object(job.build)(job.run.checkpoint, job.run, None)


def save(job: CheckpointerJob, step: int, salt: int, attempt: int = 1) -> str:
    """Save, overwrite the shards at once, wait until the save is settled, and return the id."""
    checkpointer = open_checkpointer(job)
    try:
        handle = save_with(checkpointer, job, step, salt, attempt)
        handle.settled.result()
        assert handle.state is SaveState.SETTLED
        return str(handle.id)
    finally:
        checkpointer.close()


def save_with(checkpointer: Checkpointer, job: CheckpointerJob, step: int, salt: int, attempt: int = 1) -> SaveHandle:
    """Save, overwrite the shards at once, wait until the checkpoint is visible, and return the handle."""
    registry = build_registry(job.mesh, job.large)
    shards = make_shards(registry, salt)
    handle = checkpointer.save(SaveRequest(step), shards, registry, make_document(step, attempt, salt))
    for shard in shards:
        shard.local.fill_(-2)  # as the next step would; the save must contain the earlier values
    settled_early = handle.state is SaveState.SETTLED and not handle.visible.done()
    assert not settled_early, "`handle.state` is SETTLED before `handle.visible` is done"
    listed = handle.state not in (SaveState.VISIBLE, SaveState.SETTLED) or handle.id in checkpointer.list()
    try:
        handle.visible.result()
    except SaveFailed:
        assert handle.state is SaveState.FAILED, "`handle.visible` raised SaveFailed, and `handle.state` is not FAILED"
        raise
    assert listed, "`handle.state` is VISIBLE or SETTLED, and `list()` lacks the checkpoint"
    assert handle.state is not SaveState.WRITING, "`handle.visible` is done, and `handle.state` is WRITING"
    assert handle.blocked_seconds >= 0
    return handle


def save_with_error(job: CheckpointerJob, step: int, salt: int) -> str:
    """Save, and return the class name of the exception, or "" without an exception."""
    try:
        save(job, step, salt)
    except Exception as error:
        return type(error).__name__
    return ""


def load(job: CheckpointerJob, id: str, salt: int, names: tuple[str, ...] | None = None) -> list[str]:
    """Load into shards filled with -1, and return the shards whose bits differ from the saved bits."""
    checkpointer, ident = open_checkpointer(job), CheckpointId.parse(id)
    assert ident is not None
    registry = build_registry(job.mesh, job.large)
    shards = make_shards(registry, None, names)
    try:
        checkpointer.load(ident, shards, registry)
        return find_wrong(shards, salt)
    finally:
        checkpointer.close()


def load_strange(job: CheckpointerJob, id: str, name: str, shape: tuple[int, ...]) -> str:
    """Load an array with a name or shape that is not stored, and return the class name of the exception, or ""."""
    checkpointer, ident = open_checkpointer(job), CheckpointId.parse(id)
    assert ident is not None
    registry = Registry.of(job.mesh, {name: Layout(shape, "float32")})
    try:
        checkpointer.load(ident, make_shards(registry, None), registry)
    except Exception as error:
        return type(error).__name__
    finally:
        checkpointer.close()
    return ""


def look_up(
    job: CheckpointerJob,
) -> tuple[list[str], str | None, list[dict[str, Any]], list[dict[str, tuple[int, ...]]]]:
    """Return the ids, the latest id, and each checkpoint's document and array shapes, read without a job store."""
    checkpointer = open_as_tool(job)
    ids, latest = checkpointer.list(), checkpointer.find_latest()
    documents = [checkpointer.read_document(id) for id in ids]
    arrays = [{name: tuple(shape) for name, shape in checkpointer.read_shapes(id).items()} for id in ids]
    checkpointer.close()
    return [str(id) for id in ids], str(latest) if latest else None, documents, arrays


def list_ids(job: CheckpointerJob) -> tuple[list[str], str | None]:
    """Return (ids, latest id) without reading any checkpoint."""
    checkpointer = open_as_tool(job)
    ids, latest = checkpointer.list(), checkpointer.find_latest()
    checkpointer.close()
    return [str(id) for id in ids], str(latest) if latest else None


def load_as_tool(job: CheckpointerJob, id: str, salt: int) -> list[str]:
    """Load without a job store, and return the shards whose bits differ from the saved bits."""
    checkpointer, ident = open_as_tool(job), CheckpointId.parse(id)
    assert ident is not None
    registry = build_registry(job.mesh, job.large)
    shards = make_shards(registry, None)
    checkpointer.load(ident, shards, registry)
    return find_wrong(shards, salt)


def watch_save(job: CheckpointerJob, step: int) -> tuple[bool, float, float]:
    """Save, and return (whether `save` returned a visible checkpoint, blocked seconds, seconds until visible)."""
    checkpointer = open_checkpointer(job)
    registry = build_registry(job.mesh, job.large)
    began = time.monotonic()
    handle = checkpointer.save(SaveRequest(step), make_shards(registry, step), registry, make_document(step, 1, step))
    visible = handle.visible.done() and handle.id in checkpointer.list()
    handle.visible.result()
    seconds = time.monotonic() - began
    checkpointer.close()
    return visible, handle.blocked_seconds, seconds


def save_on_a_full_disk(job: CheckpointerJob, step: int, salt: int, room: int) -> str:
    """Save with files limited to `room` bytes (RLIMIT_FSIZE), and return "SaveFailed", or "" if the save succeeds."""
    checkpointer = open_checkpointer(job)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        save_with(checkpointer, job, step, salt)
    except SaveFailed as error:
        return type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        checkpointer.close()
    return ""


# --- damage ----------------------------------------------------------------------------------------------------------


def read_outcome(job: CheckpointerJob, id: str, salt: int) -> str:
    """Read a checkpoint, and return the outcome.

    right      all values and the document are as saved
    wrong: ... arrays with other values
    gone       the id is not listed
    bad: ...   BadCheckpoint
    NAME: ...  another exception
    """
    checkpointer, ident = open_checkpointer(job), CheckpointId.parse(id)
    assert ident is not None
    registry = build_registry(job.mesh, job.large)
    shards = make_shards(registry, None)
    try:
        if ident not in checkpointer.list():
            return "gone"
        read = checkpointer.read_document(ident)
        checkpointer.load(ident, shards, registry)
    except BadCheckpoint as error:
        return f"bad: {error.array} in {error.file}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        checkpointer.close()
    mismatches = find_wrong(shards, salt)
    if read != make_document(ident.step, ident.attempt, salt):
        mismatches.append("the document")
    return f"wrong: {', '.join(mismatches)}" if mismatches else "right"


def lose_each(job: CheckpointerJob, id: str, salt: int, files: list[str]) -> list[str]:
    """Return the outcome of a read with each file deleted in turn; all ranks read at the same time."""
    return _damage_each(job, id, salt, [(file, None) for file in files])


def flip_each(job: CheckpointerJob, id: str, salt: int, places: list[tuple[str, int]]) -> list[str]:
    """Return the outcome of a read with one bit flipped at each (file, byte) of `places` in turn."""
    return _damage_each(job, id, salt, places)


def _damage_each(job: CheckpointerJob, id: str, salt: int, places: list) -> list[str]:
    world, outcomes = rank.make_comms(job.mesh).world, []
    for number, (file, place) in enumerate(places):
        path, content = Path(file), b""
        if rank.index == 0:
            content = path.read_bytes()
            if place is None:
                path.unlink()
            else:
                path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        world.barrier()
        turn = CheckpointerJob(job.build, job.run, job.mesh, f"{job.token}-{number}", job.large)
        outcomes.append(read_outcome(turn, id, salt))
        world.barrier()
        if rank.index == 0:
            path.write_bytes(content)
    world.barrier()
    return outcomes


# --- kill -9 ---------------------------------------------------------------------------------------------------------

_CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
_change_limit: int | None = None  # number of file changes before this rank kills itself; None: never
_change_count = 0
_directory = ""
_watching = False


def _watch(event: str, args: tuple) -> None:
    global _change_limit, _change_count
    if _directory and event in _CHANGES and any(_is_inside(arg) for arg in args[:2]):
        if event == "open" and not _writes(args):
            return
        if _change_limit == _change_count:
            os.kill(os.getpid(), signal.SIGKILL)
        _change_count += 1


def _is_inside(arg: object) -> bool:
    text = os.fsdecode(arg) if isinstance(arg, str | bytes | os.PathLike) else ""
    return text.startswith(_directory)


def _writes(args: tuple) -> bool:
    mode, flags = args[1], args[2]
    return bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR))


def save_and_die(job: CheckpointerJob, step: int, salt: int, victim: int | None, after: int) -> int:
    """Save, and return the number of this rank's file changes. Rank `victim` kills itself before its change `after`."""
    global _change_limit, _change_count, _directory, _watching
    if not _watching:
        sys.addaudithook(_watch)
        _watching = True
    _change_limit, _change_count, _directory = (after if victim == rank.index else None), 0, str(job.run.job.dir)
    try:
        save(job, step, salt)
        return _change_count
    finally:
        _directory = ""
