"""`checkpoint=torch`: resharding, `keep_last`, kills and full disks during saves, detection of damaged files."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
import zlib
from math import prod
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from gangline.checkpoint.base import SaveFailed, SaveRequest, SaveState
from gangline.checkpoint.id import CheckpointId
from gangline.errors import BadCheckpoint, UserError
from gangline.mesh import Mesh
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline.shard import Division, Layout, Registry, Shard, name_dtype
from gangline_basics.checkpoint.config import Off, TorchCheckpoint
from gangline_basics.checkpoint.off import NoCheckpointer
from gangline_basics.checkpoint.storage import CHECKSUMS, DOCUMENT, METADATA
from gangline_basics.checkpoint.torch_dcp import DcpCheckpointer
from gangline_testkit import rank
from gangline_testkit.pool import PoolBroken, get_pool

# --- arrays of every dtype, and layouts -------------------------------------------------------------------------------

SHAPES = {
    "model/matrix": (13, 10),
    "model/stack": (3, 5, 4),
    "model/vector": (7,),
    "model/half": (6, 8),
    "model/scalar": (),
    "model/mask": (2, 9),
    "optimizer/count": (11,),
    "optimizer/precise": (4, 4),
    "optimizer/none": (0, 5),
}
DTYPES = {
    "model/half": torch.bfloat16,
    "model/vector": torch.float16,
    "model/mask": torch.bool,
    "model/scalar": torch.float64,
    "optimizer/count": torch.int64,
    "optimizer/precise": torch.float64,
}


def value(name: str, step: int) -> torch.Tensor:
    """Return the complete array `name` after `step`."""
    generator = torch.Generator().manual_seed(hash((len(name), name.encode()[-1], step)) % 2**31)
    drawn = torch.randint(-100, 100, SHAPES[name], generator=generator)
    return drawn.to(DTYPES.get(name, torch.float32))


def rows(axis: str, *bounds: int, by_row: bool = False) -> Division:
    return Division((axis,), (bounds,), 0, by_row)


def columns(axis: str, *bounds: int) -> Division:
    return Division((axis,), (bounds,), 1)


# name -> (sizes of the mesh, divisions of the sharded arrays)
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, tuple[Division, ...]]]] = {
    "one": ({}, {}),
    "two, rows": (
        {"dp_shard": 2},
        {
            "model/matrix": (rows("dp_shard", 0, 4, 13),),
            "model/stack": (rows("dp_shard", 0, 7, 15, by_row=True),),
            "model/half": (rows("dp_shard", 0, 6, 6),),  # empty on the second rank
            "optimizer/count": (rows("dp_shard", 0, 1, 11),),
        },
    ),
    "two, columns": (
        {"tp": 2},
        {"model/matrix": (columns("tp", 0, 7, 10),), "model/mask": (columns("tp", 0, 2, 9),)},
    ),
    "four, both": (
        {"dp_shard": 2, "tp": 2},
        {
            "model/matrix": (columns("tp", 0, 3, 10), rows("dp_shard", 0, 9, 13)),
            "model/half": (rows("tp", 0, 1, 6),),
            "model/stack": (rows("dp_shard", 0, 4, 15, by_row=True),),
        },
    ),
}


def registry_of(layout: str) -> Registry:
    sizes, cuts = LAYOUTS[layout]
    dtype = {name: name_dtype(DTYPES.get(name, torch.float32)) for name in SHAPES}
    layouts = {name: Layout(shape, dtype[name], cuts.get(name, ())) for name, shape in SHAPES.items()}
    return Registry.of(Mesh.of(sizes), layouts)


def shards_of(registry: Registry, of_rank: int, step: int | None) -> list[Shard]:
    """Return the shards of rank `of_rank`, filled from the arrays of `step`, or with ones if `step` is None."""
    found = []
    for name, shape in SHAPES.items():
        whole = value(name, step) if step is not None else torch.full_like(value(name, 0), 1)
        for box, primary in registry.list_rank_boxes(name, of_rank):
            found.append(Shard(name, shape, whole.dtype, box.offset, whole[box.slices].clone(), primary))
    return found


def wrong(shards: list[Shard], step: int) -> list[str]:
    """Return the names of the shards whose values differ from the arrays of `step`."""
    return [s.name for s in shards if not torch.equal(s.local, value(s.name, step)[s.box.slices])]


def document(step: int, attempt: int = 1) -> dict:
    return {"step": step, "attempt": attempt, "cursor": 16 * step}


def save(run_dir: str, layout: str, *steps: int) -> list[float]:
    registry, kept = registry_of(layout), DcpCheckpointer(run_dir)
    handles = [
        kept.save(SaveRequest(step), shards_of(registry, rank.index, step), registry, document(step)) for step in steps
    ]
    assert all(handle.state is SaveState.SETTLED for handle in handles)
    return [handle.blocked_seconds for handle in handles]


def load(run_dir: str, layout: str, step: int) -> list[str]:
    registry, kept = registry_of(layout), DcpCheckpointer(run_dir)
    shards = shards_of(registry, rank.index, None)
    kept.load(CheckpointId(step), shards, registry)
    return wrong(shards, step)


def world(layout: str) -> int:
    return prod(LAYOUTS[layout][0].values())


@pytest.fixture
def saved(tmp_path) -> tuple[DcpCheckpointer, Path]:
    """Checkpointer with one checkpoint, of step 1, and the directory of this checkpoint."""
    save(str(tmp_path), "one", 1)
    return DcpCheckpointer(str(tmp_path)), tmp_path / "checkpoints" / "step-00000001"


def load_here(kept: DcpCheckpointer, step: int) -> list[str]:
    registry = registry_of("one")
    shards = shards_of(registry, 0, None)
    kept.load(CheckpointId(step), shards, registry)
    return wrong(shards, step)


# --- resharding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", LAYOUTS)
def test_checkpoint_loads_under_every_layout(tmp_path, writer):
    get_pool(world(writer)).run(save, str(tmp_path), writer, 3, 7)
    for reader in LAYOUTS:
        for step in (3, 7):
            assert get_pool(world(reader)).run(load, str(tmp_path), reader, step) == [[]] * world(reader)


def test_each_box_is_written_once_by_its_primary(tmp_path):
    get_pool(4).run(save, str(tmp_path), "four, both", 1)
    registry = registry_of("four, both")
    written = json.loads((tmp_path / "checkpoints/step-00000001" / CHECKSUMS).read_text())["records"]
    boxes = [box for name in SHAPES for box in registry.list_boxes(name) if box.size]
    assert sum(map(len, written.values())) == len(boxes)
    assert len(written) == 4, "every rank writes some of it"


def test_views_of_larger_tensors_are_saved_and_filled(tmp_path):
    """Check shards that are views of columns or of a transposed tensor: only the view is written and filled."""
    registry = Registry.of(Mesh.of({}), {"model/a": Layout((30, 20)), "model/b": Layout((4, 6))})
    base, turned = torch.randn(60, 50), torch.randn(6, 4)
    shards = [
        Shard("model/a", (30, 20), torch.float32, (0, 0), base[10:40, 5:25]),
        Shard("model/b", (4, 6), torch.float32, (0, 0), turned.T),
    ]
    kept = DcpCheckpointer(str(tmp_path))
    kept.save(SaveRequest(1), shards, registry, document(1))
    assert (tmp_path / "checkpoints/step-00000001/__0_0.distcp").stat().st_size < 6000
    other = torch.zeros(60, 50)
    kept.load(
        CheckpointId(1),
        [
            Shard("model/a", (30, 20), torch.float32, (0, 0), other[10:40, 5:25]),
            Shard("model/b", (4, 6), torch.float32, (0, 0), (back := torch.zeros(6, 4)).T),
        ],
        registry,
    )
    assert torch.equal(other[10:40, 5:25], base[10:40, 5:25])
    assert torch.equal(back, turned)
    other[10:40, 5:25] = 0
    assert not other.any()


def test_part_of_array_loads_into_any_boxes(saved):
    kept, _ = saved
    whole = value("model/matrix", 1)
    views = [torch.zeros(5, 4), torch.zeros(13, 1)]  # two boxes of one array
    shards = [
        Shard("model/matrix", (13, 10), torch.float32, (2, 3), views[0]),
        Shard("model/matrix", (13, 10), torch.float32, (0, 9), views[1]),
    ]
    kept.load(CheckpointId(1), shards, registry_of("one"))
    assert torch.equal(views[0], whole[2:7, 3:7])
    assert torch.equal(views[1], whole[:, 9:])


def test_weights_may_be_loaded_in_another_precision(saved):
    kept, _ = saved
    half = torch.zeros(13, 10, dtype=torch.bfloat16)
    kept.load(CheckpointId(1), [Shard("model/matrix", (13, 10), torch.bfloat16, (0, 0), half)], registry_of("one"))
    assert torch.equal(half, value("model/matrix", 1).to(torch.bfloat16))


def test_checkpoint_is_readable_by_pytorch_tools(saved, tmp_path):
    _, path = saved
    wanted = {name: torch.zeros_like(value(name, 1)) for name in SHAPES if prod(SHAPES[name])}
    dcp.load(wanted, checkpoint_id=str(path), no_dist=True)
    assert all(torch.equal(tensor, value(name, 1)) for name, tensor in wanted.items())
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    assert torch.equal(whole["model/matrix"], value("model/matrix", 1))


# --- lists, documents and refusals ------------------------------------------------------------------------------------


def test_checkpointer_lists_checkpoints_documents_and_shapes(tmp_path):
    kept = DcpCheckpointer(str(tmp_path / "run"))
    assert kept.list() == []
    assert kept.find_latest() is None
    registry = registry_of("one")
    for step, attempt in [(20, 1), (5, 1), (10, 2)]:
        kept.save(SaveRequest(step), shards_of(registry, 0, step), registry, document(step, attempt))
    assert [str(id) for id in kept.list()] == ["step-00000005", "step-00000010.2", "step-00000020"]
    assert kept.read_document(CheckpointId(10, 2)) == document(10, 2)
    assert kept.read_shapes(CheckpointId(5)) == SHAPES
    assert kept.find_latest() == CheckpointId(20)


def test_existing_checkpoint_is_never_overwritten(saved):
    kept, path = saved
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    registry = registry_of("one")
    with pytest.raises(FileExistsError, match="never overwritten"):
        kept.save(SaveRequest(1), shards_of(registry, 0, 2), registry, document(1))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert load_here(kept, 1) == []


def test_missing_or_mismatched_array_is_refused(saved):
    kept, _ = saved

    def ask(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        tensor = torch.zeros(shape, dtype=dtype)
        kept.load(CheckpointId(1), [Shard(name, shape, dtype, (0,) * len(shape), tensor)], registry_of("one"))

    with pytest.raises(UserError, match="lacks arrays of this run: model/absent"):
        ask("model/absent", (2,), torch.float32)
    with pytest.raises(UserError, match=r"shape \(13, 10\) in checkpoint step-00000001, and \(10, 13\)"):
        ask("model/matrix", (10, 13), torch.float32)
    with pytest.raises(UserError, match=r"model/matrix is torch.float32 .* and torch.int64"):
        ask("model/matrix", (13, 10), torch.int64)
    with pytest.raises(UserError, match=r"checkpoint step-00000009 does not exist(.|\n)*step-00000001"):
        kept.read_document(CheckpointId(9))


def test_save_refuses_shards_that_do_not_tile_arrays(tmp_path):
    registry, kept = registry_of("one"), DcpCheckpointer(str(tmp_path))
    shards = shards_of(registry, 0, 1)
    with pytest.raises(ValueError, match="model/vector do not tile"):
        kept.save(SaveRequest(1), [s for s in shards if s.name != "model/vector"], registry, document(1))
    stranger = Shard("model/stranger", (1,), torch.float32, (0,), torch.zeros(1))
    with pytest.raises(ValueError, match="model/stranger"):
        kept.save(SaveRequest(1), [*shards, stranger], registry, document(1))
    assert kept.list() == []
    assert not (tmp_path / "checkpoints").exists()


def test_checkpoint_off_refuses_to_save(tmp_path):
    kept = NoCheckpointer(str(tmp_path))
    assert not kept.keeps
    assert kept.find_latest() is None
    with pytest.raises(SaveFailed, match="checkpoint=off"):
        kept.save(SaveRequest(1), [], registry_of("one"), document(1))
    assert not Off().at_end


def test_automatic_interval_is_refused():
    (problem,) = TorchCheckpoint(every="auto").check(None)
    assert "does not compute an optimal checkpoint interval" in problem.why
    assert TorchCheckpoint(every=10, keep_last=2).check(None) == []


# --- keep_last --------------------------------------------------------------------------------------------------------


def keep(run_dir: Path, keep_last: int | None, *saves: tuple[int, int]) -> list[str]:
    registry, kept = registry_of("one"), DcpCheckpointer(str(run_dir), keep_last)
    for step, attempt in saves:
        kept.save(SaveRequest(step), shards_of(registry, 0, step), registry, document(step, attempt))
    return [str(id) for id in kept.list()]


def test_keep_last_deletes_older_checkpoints(tmp_path):
    assert keep(tmp_path, 2, (1, 1), (2, 1), (3, 1), (4, 1)) == ["step-00000003", "step-00000004"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]


def test_keep_last_counts_current_branch_only(tmp_path):
    assert len(keep(tmp_path, None, (10, 1), (20, 1), (30, 1))) == 3
    attempts.append(tmp_path, Attempt(2, "step-00000020", why="loss spike"))
    assert keep(tmp_path, 2, (25, 2)) == ["step-00000020", "step-00000025.2"]  # step 30 belongs to the abandoned branch
    assert keep(tmp_path, 1, (26, 2)) == ["step-00000026.2"]


def test_keep_last_never_deletes_new_checkpoint(tmp_path):
    attempts.append(tmp_path, Attempt(3, None))
    assert keep(tmp_path, 1, (10, 1)) == ["step-00000010"]


def test_failed_save_deletes_no_checkpoint(tmp_path):
    keep(tmp_path, None, (1, 1), (2, 1), (3, 1))
    registry = registry_of("one")
    with pytest.raises(ValueError, match="do not tile"):
        DcpCheckpointer(str(tmp_path), 1).save(SaveRequest(4), shards_of(registry, 0, 4)[1:], registry, document(4))
    assert len(DcpCheckpointer(str(tmp_path)).list()) == 3


# --- full and read-only disks ----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """Directory with room for two checkpoints, and the maximum file size there (None: the disk sets the limit)."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid() == 0
        and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)]).returncode == 0
    ):
        yield disk, None
        subprocess.run(["umount", str(disk)], check=True)
    else:
        yield disk, 4096


def save_too_much(run_dir: str, layout: str, limit: int | None) -> tuple[str, str, list[str]]:
    """Save until a save fails; return the type and message of the error, and the checkpoints that remain."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    registry, kept = registry_of(layout), DcpCheckpointer(run_dir)
    kept.save(SaveRequest(1), shards_of(registry, rank.index, 1), registry, document(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is not None and rank.index == rank.world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        for step in range(2, 100):
            kept.save(SaveRequest(step), shards_of(registry, rank.index, step), registry, document(step))
    except SaveFailed as error:
        return type(error).__name__, str(error), [str(id) for id in kept.list()]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    raise AssertionError("the disk never filled up")


@pytest.mark.parametrize("layout", ["one", "two, rows"])
def test_full_disk_fails_save_on_every_rank(small_disk, layout):
    disk, limit = small_disk
    told = get_pool(world(layout)).run(save_too_much, str(disk), layout, limit)
    assert len(set(map(str, told))) == 1
    kind, message, left = told[0]
    assert kind == "SaveFailed"
    assert "could not be saved: " + ("No space left on device" if limit is None else "File too large") in message
    assert str(disk) in message
    assert left
    assert sorted(path.name for path in (disk / "checkpoints").iterdir()) == left, "its own remains take no room"
    for name in left:
        assert get_pool(1).run(load, str(disk), "one", CheckpointId.parse(name).step) == [[]]


def test_full_disk_does_not_trigger_keep_last(small_disk):
    disk, limit = small_disk
    registry, kept = registry_of("one"), DcpCheckpointer(str(disk), keep_last=1)
    kept.save(SaveRequest(1), shards_of(registry, 0, 1), registry, document(1))
    filler = disk / "filler"
    if limit is None:
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(1 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit or before[0], before[1]))
    try:
        with pytest.raises(SaveFailed):
            kept.save(SaveRequest(2), shards_of(registry, 0, 2), registry, document(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept.list() == [CheckpointId(1)]
    filler.unlink(missing_ok=True)
    kept.save(SaveRequest(2), shards_of(registry, 0, 2), registry, document(2))
    assert kept.list() == [CheckpointId(2)]


def test_a_read_only_directory_can_be_read(small_disk):
    disk, limit = small_disk
    registry, kept = registry_of("one"), DcpCheckpointer(str(disk))
    kept.save(SaveRequest(1), shards_of(registry, 0, 1), registry, document(1))
    if limit is None:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    else:
        (disk / "checkpoints").chmod(0o555)
    try:
        with pytest.raises(SaveFailed, match=r"Read-only file system|Permission denied"):
            kept.save(SaveRequest(2), shards_of(registry, 0, 2), registry, document(2))
        assert load_here(kept, 1) == []
        assert kept.read_document(kept.find_latest()) == document(1)
    finally:
        (disk / "checkpoints").chmod(0o755) if limit else None


# --- kill -9 ---------------------------------------------------------------------------------------------------------


def save_for_ever(run_dir: str, layout: str, first: int) -> None:
    """Save step after step, and append each completed step to the file `done`."""
    registry, kept = registry_of(layout), DcpCheckpointer(run_dir)
    with open(Path(run_dir) / "done", "a", buffering=1) as done:
        for step in range(first, first + 100_000):
            kept.save(SaveRequest(step), shards_of(registry, rank.index, step), registry, document(step))
            if rank.index == 0:
                done.write(f"{step}\n")


def kill_while_saving(run_dir: Path, layout: str, seed: int) -> tuple[list[int], list[int]]:
    """Kill one rank or all ranks by SIGKILL during a save; return (steps noted as done, steps listed).

    The kill comes at a random moment or, for even seeds, while all ranks are stopped and a save is half-written.
    """
    chance = random.Random(seed)
    kept = DcpCheckpointer(str(run_dir))
    first = 1 + max((id.step for id in kept.list()), default=0)
    ranks = get_pool(world(layout))
    victims = ranks.pids if chance.random() < 0.5 else [chance.choice(ranks.pids)]
    done = run_dir / "done"
    done.unlink(missing_ok=True)

    def kill() -> None:
        while not (done.exists() and done.stat().st_size):  # wait for the first save, which includes loading code
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.15))
        while seed % 2 == 0 and not half_written(run_dir, stop=ranks.pids):
            time.sleep(0.001)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        for pid in {*ranks.pids} - {*victims}:
            os.kill(pid, signal.SIGCONT)

    killer = threading.Thread(target=kill)
    killer.start()
    # A rank may report the death of its peer (RuntimeError) before the pool breaks.
    with pytest.raises((PoolBroken, RuntimeError)):
        ranks.run(save_for_ever, str(run_dir), layout, first)
    killer.join()
    return [int(line) for line in done.read_text().split()], [id.step for id in kept.list() if id.step >= first]


def half_written(run_dir: Path, stop: list[int]) -> bool:
    """Stop the processes and return whether a save is under way; if not, continue the processes."""
    for pid in stop:
        os.kill(pid, signal.SIGSTOP)
    if any(path.name.startswith(".tmp-") for path in (run_dir / "checkpoints").iterdir()):
        return True
    for pid in stop:
        os.kill(pid, signal.SIGCONT)
    return False


def check_after_kills(run_dir: Path, layout: str, kills: int) -> None:
    kept = DcpCheckpointer(str(run_dir))
    torn = 0
    for seed in range(kills):
        done, visible = kill_while_saving(run_dir, layout, seed)
        assert visible[: len(done)] == done, "what save gave back is there"
        assert len(visible) - len(done) <= 1, "but for the one under way nothing else is"
        torn += any(path.name.startswith(".tmp-") for path in (run_dir / "checkpoints").iterdir())
        for step in visible[-3:]:
            assert load_here(kept, step) == []
        for id in kept.list()[:-1]:
            shutil.rmtree(run_dir / "checkpoints" / str(id))
    assert torn, "no kill fell into a save: this test shows nothing"
    registry, step = registry_of("one"), kept.find_latest().step + 1
    kept.save(SaveRequest(step), shards_of(registry, 0, step), registry, document(step))
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {str(CheckpointId(step - 1)), str(CheckpointId(step))}, "the remains of dead saves are gone"


def test_kill_during_save_leaves_complete_checkpoints(tmp_path):
    check_after_kills(tmp_path, "two, rows", kills=5)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hundreds_of_kills_leave_complete_checkpoints(tmp_path, layout):
    check_after_kills(tmp_path, layout, kills=40)


# --- damaged files ----------------------------------------------------------------------------------------------------


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def where(path: Path, name: str) -> tuple[int, int]:
    """Return offset and length of the record of an array in `__0_0.distcp`."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    ((_, place),) = [(index, place) for index, place in metadata.storage_data.items() if index.fqn == name]
    return place.offset, place.length


def test_load_reports_array_with_flipped_bit(saved):
    kept, path = saved
    offset, length = where(path, "model/matrix")
    flip(path / "__0_0.distcp", offset + length // 2)
    with pytest.raises(BadCheckpoint, match="the checksum of the record differs") as caught:
        load_here(kept, 1)
    assert caught.value.array == "model/matrix"
    assert caught.value.box == ((0, 13), (0, 10))
    assert caught.value.file == str(path / "__0_0.distcp")
    assert kept.read_document(CheckpointId(1)) == document(1), "what is not damaged can be read"


def test_load_verifies_requested_arrays_only(saved):
    """Check that damaged optimizer arrays do not prevent sampling, which loads only the weights."""
    kept, path = saved
    offset, length = where(path, "optimizer/count")
    flip(path / "__0_0.distcp", offset + length // 2)
    shards = [s for s in shards_of(registry_of("one"), 0, None) if s.name.startswith("model/")]
    kept.load(CheckpointId(1), shards, registry_of("one"))
    assert wrong(shards, 1) == []
    with pytest.raises(BadCheckpoint, match="optimizer/count"):
        load_here(kept, 1)


class Trap:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def replace_table(path: Path, content: bytes) -> None:
    """Replace DCP's table of chunks in a checkpoint, and update the checksum of the table."""
    (path / METADATA).write_bytes(content)
    checksums = json.loads((path / CHECKSUMS).read_text())
    checksums["files"][METADATA] = zlib.crc32(content)
    (path / CHECKSUMS).write_text(json.dumps(checksums))


def test_metadata_pickle_with_unknown_code_is_refused(saved, tmp_path):
    kept, path = saved
    replace_table(path, pickle.dumps(Trap(tmp_path / "executed")))
    with pytest.raises(BadCheckpoint, match="which DCP's table of chunks never contains"):
        load_here(kept, 1)
    assert not (tmp_path / "executed").exists()


NAMES = "ctorch.distributed.checkpoint.metadata\n"


@pytest.mark.parametrize(
    "target",
    [f"{NAMES}MetadataIndex\n", f"{NAMES}_MEM_FORMAT_ENCODING\n(I0\ntR", "ctorch.serialization\n_get_layout\n"],
    ids=["class", "member of an enumeration", "function"],
)
def test_metadata_pickle_that_sets_state_is_refused(saved, target):
    """Check pickles that would set state on classes and functions, and so change every later load of the process."""
    kept, path = saved
    table = (path / METADATA).read_bytes()
    replace_table(path, f"{target}(N(S'__hash__'\nNdtb.".encode())
    with pytest.raises(BadCheckpoint, match=r"sets the state of .*, which is not an entry of DCP's table of chunks"):
        load_here(kept, 1)
    replace_table(path, table)
    assert load_here(kept, 1) == []


@pytest.mark.parametrize("name", ["../../fifo", "__0_1.distcp", "/dev/zero"])
def test_record_outside_checkpoint_files_is_refused(saved, name):
    kept, path = saved
    os.mkfifo(path / name if name != "/dev/zero" else path / "fifo")
    table = dcp.FileSystemReader(path).read_metadata()
    for place in table.storage_data.values():
        place.relative_path, place.length = name, 1 << 38
    replace_table(path, pickle.dumps(table))
    with pytest.raises(BadCheckpoint, match=r"the checksum of the record is missing in checksums\.json"):
        load_here(kept, 1)
    checksums = json.loads((path / CHECKSUMS).read_text())
    rows = [[place.offset, 1 << 38, 0] for place in table.storage_data.values()]
    (path / CHECKSUMS).write_text(json.dumps({**checksums, "records": {name: rows}}))
    with pytest.raises(BadCheckpoint, match="is a named pipe" if name == "__0_1.distcp" else "must be named"):
        load_here(kept, 1)


def test_record_longer_than_file_is_refused_before_reading(saved):
    kept, path = saved
    table = dcp.FileSystemReader(path).read_metadata()
    rows = []
    for place in table.storage_data.values():
        place.length = 1 << 38
        rows.append([place.offset, 1 << 38, 0])
    replace_table(path, pickle.dumps(table))
    checksums = json.loads((path / CHECKSUMS).read_text())
    (path / CHECKSUMS).write_text(json.dumps({**checksums, "records": {"__0_0.distcp": rows}}))
    with pytest.raises(BadCheckpoint, match=r"the file is \d+ bytes too short"):
        load_here(kept, 1)


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA, DOCUMENT, CHECKSUMS])
@pytest.mark.parametrize("how", ["cut short", "empty", "missing"])
def test_incomplete_file_is_reported(saved, name, how):
    kept, path = saved
    file = path / name
    if how == "missing":
        file.unlink()
    else:
        os.truncate(file, 0 if how == "empty" else file.stat().st_size // 2)
    if how == "missing" and name == CHECKSUMS:
        assert kept.list() == [], "without it there was no commit"
    with pytest.raises(BadCheckpoint) as caught:
        kept.read_document(CheckpointId(1)) if name == DOCUMENT else load_here(kept, 1)
    assert caught.value.file == str(file)


def test_random_bit_flip_never_gives_wrong_values(saved):
    """Check that a load, and reading the document, either detects the flipped bit or returns the right values."""
    kept, path = saved
    chance = random.Random(0)
    files = {file: file.read_bytes() for file in path.iterdir()}
    found = 0
    for _ in range(400):
        file = chance.choice(list(files))
        flip(file, chance.randrange(len(files[file])), chance.randrange(8))
        try:
            assert kept.read_document(CheckpointId(1)) == document(1)
            assert load_here(kept, 1) == []
        except BadCheckpoint:
            found += 1
        file.write_bytes(files[file])
    assert found > 300


def load_damaged(run_dir: str, layout: str) -> str:
    try:
        load(run_dir, layout, 1)
    except BadCheckpoint as error:
        return f"{error.array} {error.box} {Path(error.file).name} {error.why}"
    return "whole"


def test_damage_on_one_rank_fails_every_rank(tmp_path):
    get_pool(2).run(save, str(tmp_path), "two, rows", 1)
    path = tmp_path / "checkpoints" / "step-00000001"
    rows_of_rank_1 = next(
        place
        for index, place in dcp.FileSystemReader(path).read_metadata().storage_data.items()
        if index.fqn == "model/matrix" and tuple(index.offset) == (4, 0)
    )
    flip(path / rows_of_rank_1.relative_path, rows_of_rank_1.offset + rows_of_rank_1.length // 2)
    told = get_pool(2).run(load_damaged, str(tmp_path), "two, rows")
    why = f"the checksum of the record differs from {CHECKSUMS}"
    assert told == [f"model/matrix ((4, 13), (0, 10)) {rows_of_rank_1.relative_path} {why}"] * 2
    flip(path / METADATA, 100)
    assert (
        get_pool(2).run(load_damaged, str(tmp_path), "two, rows")
        == [f"every array None {METADATA} the checksum of the file differs from {CHECKSUMS}"] * 2
    )
