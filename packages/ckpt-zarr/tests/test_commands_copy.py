"""`gangline ckpt copy` between stores, atomic, and `--open` copies that any zarr reader opens by path."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from layouts import registries
from made import cut, run_dir, save, small, whole

from gangline.cli.main import main
from gangline.errors import BadCheckpoint
from gangline.mesh import Mesh
from gangline.shard import Box, Division, Layout, Registry
from gangline_ckpt_zarr.commands import copy, text
from gangline_ckpt_zarr.commands.where import find_place
from gangline_ckpt_zarr.format import native, zarr_json
from gangline_ckpt_zarr.format.dtypes import map_dtype
from gangline_ckpt_zarr.format.native import NativeMeta
from gangline_ckpt_zarr.load.read_plan import Target, plan_reads
from gangline_ckpt_zarr.load.reader import ChunkReader
from gangline_ckpt_zarr.stores.local import LocalStore
from gangline_ckpt_zarr.stores.open import open_store

PLACE = "step-00000012"
DOCUMENT = {"step": 12, "cursor": 48}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save(str(tmp_path / "from" / PLACE), small(), document=DOCUMENT)
    return tmp_path / "from" / PLACE


def files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def read(place: str, name: str, box: Box) -> np.ndarray:
    copy = find_place([place]).copy()
    array = np.empty(box.shape, map_dtype(copy.meta.registry[name].dtype))
    for rank, items in plan_reads(copy.meta, [Target(name, box, array)]).items():
        ChunkReader(copy.meta, copy.meta.get_file_path(rank), copy.store).read(items)
    return array


def holds(place: str, registry: Registry) -> bool:
    """Check that the reader of this package finds every array there; return True."""
    for name, layout in registry.layouts.items():
        found = read(place, name, Box((0,) * len(layout.shape), layout.shape))
        assert np.array_equal(found, whole(name, layout).double().numpy()), name
    return True


# --- byte-identical copies ---


def test_copy_is_byte_identical(source, tmp_path, capsys):
    assert main(["ckpt", "copy", str(source), str(tmp_path / "to" / "best")]) == 0
    assert files(tmp_path / "to" / "best") == files(source)
    assert main(["ckpt", "verify", str(tmp_path / "to" / "best")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/to/best: copy of {source}\n")


def test_copy_between_stores_round_trips(source, tmp_path):
    assert main(["ckpt", "copy", str(source), "memory://copy/a/"]) == 0
    assert main(["ckpt", "copy", "memory://copy/a", PLACE, str(tmp_path / "back")]) == 0
    assert files(tmp_path / "back") == files(source)


def test_copy_resolves_destination_path(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("shelf")
    run = run_dir(tmp_path / "run")
    for to, lies in (
        ("shelf", f"shelf/{PLACE}"),
        ("new/", f"new/{PLACE}"),
        ("other", "other"),
        ("deep/step-00000012", "deep/step-00000012"),
        (str(run), f"{run}/checkpoints/{PLACE}"),
    ):
        assert main(["ckpt", "copy", str(source), to]) == 0
        assert files(Path(lies)) == files(source)


def test_copy_refuses_to_overwrite_checkpoint(source, tmp_path, capsys):
    to = tmp_path / "to" / PLACE
    save(str(to), small(1))
    before = files(to)
    for flags in ([], ["--open"]):
        assert main(["ckpt", "copy", str(source), str(to), *flags]) == 2
        assert "already contains a checkpoint" in capsys.readouterr().err
    assert files(to) == before


def test_copy_replaces_remains_of_interrupted_copy(source, tmp_path):
    left = tmp_path / "to" / PLACE / "data-0badcafe" / "00000.bin"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    assert main(["ckpt", "copy", str(source), str(tmp_path / "to" / PLACE)]) == 0
    assert files(tmp_path / "to" / PLACE) == files(source)


@pytest.mark.parametrize("flags", [[], ["--open"]])
def test_copy_of_damaged_checkpoint_leaves_no_files(source, tmp_path, flags, capsys):
    meta = find_place([str(source)]).copy().meta
    path, run = source / meta.get_file_path(1), meta.files.get_rank_file(1).runs[-1]
    content = bytearray(path.read_bytes())
    content[run.base] ^= 4
    path.write_bytes(content)
    assert main(["ckpt", "copy", str(source), str(tmp_path / "to"), *flags]) == 1
    out = capsys.readouterr().out
    assert f"{run.name}[" in out or not run.box.shape
    assert f"in {path} is damaged: its checksum differs" in out
    assert not (tmp_path / "to").exists() or files(tmp_path / "to") == {}


@pytest.mark.parametrize("flags", [[], ["--open"]])
def test_copy_damaged_during_write_is_not_committed(source, tmp_path, flags, monkeypatch, capsys):
    """Flip a bit in each write, as a failing disk does."""
    create = LocalStore.create

    def flips(self, path, size):
        writer = create(self, path, size)
        write = writer.write

        def flip(content):
            content[5] ^= 1
            write(content)

        writer.write = flip
        return writer

    monkeypatch.setattr(LocalStore, "create", flips)
    assert main(["ckpt", "copy", str(source), str(tmp_path / "to"), *flags]) == 1
    assert f"in {tmp_path}/to/" in capsys.readouterr().out
    assert not (tmp_path / "to").exists() or files(tmp_path / "to") == {}


# --- open copies ---


def stock(place: str, registry: Registry) -> bool:
    group = zarr.open_group(place, mode="r")
    for name, layout in registry.layouts.items():
        # With and without consolidated metadata.
        for array in (group[name], zarr.open_array(f"{place}/{name}", mode="r")):
            assert array.shape == layout.shape
            assert array.attrs["dtype"] == layout.dtype
            assert np.array_equal(array[...], whole(name, layout).double().numpy()), name
    return True


def test_zarr_opens_open_copy_by_path(source, tmp_path, capsys):
    to = str(tmp_path / "open")
    assert main(["ckpt", "copy", str(source), to, "--open"]) == 0
    assert stock(to, small())
    assert holds(to, small())
    assert main(["ckpt", "verify", to]) == 0
    capsys.readouterr()
    assert main(["ckpt", "show", to]) == 0
    out = capsys.readouterr().out
    stored = sum(file.stat().st_size for file in Path(to).rglob("*") if file.is_file() and file.name != "zarr.json")
    assert f", {text.size(stored)} in files that any zarr reader opens" in out
    assert out.count("a file for each chunk") == 7
    assert "dp_shard" not in out  # an open copy does not record the sharding


def test_zarr_reads_open_copy_without_consolidated_metadata(source, tmp_path):
    to = str(tmp_path / "open")
    main(["ckpt", "copy", str(source), to, "--open"])
    group = zarr.open_group(to, mode="r", use_consolidated=False)
    assert sorted(name for name, _ in group.groups()) == ["model", "optimizer", "state"]
    assert sorted(name for name, _ in group["model"].arrays()) == [
        "bias",
        "blocks.0.w",
        "blocks.1.w",
        "columns",
        "half",
    ]


MANY = Registry.of(
    Mesh.of({"tp": 8}),
    {
        "model/rows": Layout((70 * 8, 3), "float32", (Division(("tp",), cut(70 * 8, 8)),)),
        "model/grid": Layout((40, 36), "bfloat16", (Division(("tp",), cut(36, 8), 1),)),
        "model/one": Layout((3,), "int64"),
    },
)


def test_open_copy_shards_arrays_with_many_chunks(tmp_path, monkeypatch):
    """Set the threshold to four chunks: an array of more chunks is stored in one file."""
    monkeypatch.setattr(native, "MOST_FILES", 4)
    save(str(tmp_path / "a"), MANY)
    to = str(tmp_path / "open")
    assert main(["ckpt", "copy", str(tmp_path / "a"), to, "--open"]) == 0
    nodes = json.loads((tmp_path / "open" / "model" / "rows" / "zarr.json").read_text())
    assert nodes["codecs"][0]["name"] == "sharding_indexed"
    data = [path for path in files(Path(to)) if not path.endswith("zarr.json")]
    assert sorted(data) == ["model/grid/c/0/0", "model/one/c/0", "model/rows/c/0/0"]
    assert stock(to, MANY)
    assert holds(to, MANY)
    part = zarr.open_array(f"{to}/model/rows", mode="r")[100:250, 1:]
    assert np.array_equal(part, whole("model/rows", MANY["model/rows"]).numpy()[100:250, 1:])
    assert main(["ckpt", "verify", to]) == 0


def test_open_copy_can_be_copied_again(source, tmp_path):
    main(["ckpt", "copy", str(source), str(tmp_path / "open"), "--open"])
    assert main(["ckpt", "copy", str(tmp_path / "open"), "memory://copy/again"]) == 0
    assert find_place(["memory://copy/again"]).copy().content == (tmp_path / "open" / "zarr.json").read_bytes()
    assert holds("memory://copy/again", small())


def test_damage_in_an_open_copy_is_named(source, tmp_path, capsys):
    to = tmp_path / "open"
    main(["ckpt", "copy", str(source), str(to), "--open"])
    path = to / "model" / "columns" / "c" / "0" / "1"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (to / "model" / "bias" / "c" / "0").unlink()
    capsys.readouterr()
    assert main(["ckpt", "verify", str(to)]) == 1
    out = capsys.readouterr().out
    assert f"model/columns[0:8, 12:24] in {path} is damaged: its checksum differs" in out
    assert "model/bias[0:33] in " in out
    with pytest.raises(BadCheckpoint, match="model/columns"):
        holds(str(to), Registry(small().mesh, {"model/columns": small()["model/columns"]}))


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def test_verify_checks_every_file_of_open_copy(tmp_path, monkeypatch, capsys):
    """Flip bits in each file (chunks, shards with their index, every zarr.json), and delete each file.

    Only padding may change.
    """
    monkeypatch.setattr(native, "MOST_FILES", 4)
    save(str(tmp_path / "a"), MANY)
    to = tmp_path / "open"
    main(["ckpt", "copy", str(tmp_path / "a"), str(to), "--open"])
    every = files(to)
    assert {path.rpartition("/")[2] for path in every} >= {"zarr.json", "0"}
    draw = random.Random(3)
    for path in every:
        content = (to / path).read_bytes()
        places = [len(content) - 1, draw.randrange(len(content))]  # the last byte of a shard is in its index
        if path.endswith("zarr.json") and path != "zarr.json":
            places.append(content.index(b"{") + 1)
        for place in places:
            (to / path).write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            padding = path.endswith("c/0/0") and main(["ckpt", "verify", str(to)]) == 0
            assert padding or main(["ckpt", "verify", str(to)]) == 1, (path, place)
            assert not (padding and place == len(content) - 1), "the index of a shard is no padding"
        (to / path).unlink()
        assert main(["ckpt", "verify", str(to)]) in (1, 2)
        (to / path).write_bytes(content)
    assert main(["ckpt", "verify", str(to)]) == 0


def test_verify_detects_changed_shape_in_open_copy(source, tmp_path, capsys):
    main(["ckpt", "copy", str(source), str(tmp_path / "open"), "--open"])
    node = tmp_path / "open" / "model" / "columns" / "zarr.json"
    node.write_text(node.read_text().replace('"shape": [8, 24]', '"shape": [24, 8]'))
    capsys.readouterr()
    assert main(["ckpt", "verify", str(tmp_path / "open")]) == 1
    assert (
        f"model/columns in {node} is damaged: the content does not match the root's zarr.json"
        in capsys.readouterr().out
    )


def test_verify_detects_swapped_chunk_files(source, tmp_path, capsys):
    """Swap complete chunk files, with valid checksums, within one array and between two arrays."""
    to = tmp_path / "open"
    main(["ckpt", "copy", str(source), str(to), "--open"])
    here, moment = to / "model/blocks.0.w/c/0/0", to / "optimizer/exp_avg/blocks.0.w/c/0/0"
    for there in (here.parent.parent / "1" / "0", moment):
        assert here.read_bytes() != there.read_bytes()
        swap(here, there)
        capsys.readouterr()
        assert main(["ckpt", "verify", str(to)]) == 1
        assert capsys.readouterr().out.count("the chunk belongs to another save, array or position") == 2
        with pytest.raises(BadCheckpoint, match="another save, array or position"):
            holds(str(to), small())
        swap(here, there)
    assert holds(str(to), small())


@pytest.mark.parametrize("to", ["{source}", "{source}/inside", "{source}/", "{link}/inside", "{source}/../{name}/x"])
@pytest.mark.parametrize("way", [[], ["--open"]])
def test_copy_refuses_destination_inside_source(source, tmp_path, to, way, capsys):
    (tmp_path / "link").symlink_to(source)
    before = files(source)
    to = to.format(source=source, link=tmp_path / "link", name=source.name)
    assert main(["ckpt", "copy", str(source), to, *way]) == 2
    assert files(source) == before
    err = capsys.readouterr().err
    assert "would be inside that checkpoint" in err or "already contains a checkpoint" in err


def test_concurrent_copies_to_one_destination_are_refused(source, tmp_path, capsys):
    """Hold the lock of the destination; without it, the second copy would delete the files of the first."""
    to = tmp_path / PLACE
    with open_store(str(to)).lock():
        assert main(["ckpt", "copy", str(source), str(to)]) == 2
    assert "another process is copying to" in capsys.readouterr().err
    assert main(["ckpt", "copy", str(source), str(to)]) == 0


def test_repeated_copy_refuses_existing_destination(source, tmp_path, capsys):
    to = str(tmp_path / "mine")
    assert main(["ckpt", "copy", str(source), to]) == 0
    before = files(Path(to))
    for word, said in ((to, "already contains a checkpoint"), (f"{to}/", f"would be inside {to}")):
        assert main(["ckpt", "copy", str(source), word]) == 2
        assert said in capsys.readouterr().err
    assert files(Path(to)) == before


def test_copy_refuses_name_of_another_step(source, tmp_path, capsys):
    assert main(["ckpt", "copy", str(source), str(tmp_path / "step-00000099")]) == 2
    assert "cannot have the name step-00000099" in capsys.readouterr().err
    assert not (tmp_path / "step-00000099").exists()


@pytest.mark.parametrize("way", [[], ["--open"]])
def test_copy_without_disk_space_leaves_no_files(source, tmp_path, way):
    """Check that the created directories are removed too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        assert main(["ckpt", "copy", str(source), str(tmp_path / "new" / "deep" / "copy"), *way]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "new").exists()


def test_refs_refuses_open_copy(source, tmp_path, capsys):
    main(["ckpt", "copy", str(source), str(tmp_path / "open"), "--open"])
    assert main(["ckpt", "refs", str(tmp_path / "open")]) == 2
    assert "zarr.open_group" in capsys.readouterr().err


@settings(max_examples=12, deadline=None)
@given(registries(8))
def test_open_copy_of_any_layout_is_readable(tmp_path_factory, registry: Registry) -> None:
    place = tmp_path_factory.mktemp("any")
    meta = save(str(place / "a"), registry)
    copy._copy_by_chunk(find_place([str(place / "a")]).copy(), open_store(str(place / "open")))
    made = zarr_json.read((place / "open" / "zarr.json").read_bytes(), "zarr.json")
    assert isinstance(made, NativeMeta)
    assert made.shapes == meta.shapes
    chunks = sum(run.count for rank in range(registry.mesh.world) for run in meta.files.get_rank_file(rank).runs)
    ranks = [rank for rank in range(made.registry.mesh.world) if made.files.get_rank_file(rank).runs]
    assert sum(run.count for rank in ranks for run in made.files.get_rank_file(rank).runs) == chunks
    assert holds(str(place / "open"), registry)
    assert stock(str(place / "open"), registry)
