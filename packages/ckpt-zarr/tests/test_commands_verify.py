"""`gangline ckpt verify`: every changed chunk of data is reported, in any store and tier."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from layouts import registries
from made import run_dir, save, small, staged

from gangline.cli.main import main
from gangline.mesh import Mesh
from gangline.shard import Layout, Registry
from gangline_ckpt_zarr.commands.bad_chunks import BadChunks, FileScanner, merge_runs
from gangline_ckpt_zarr.format.checksum import TRAILER
from gangline_ckpt_zarr.format.chunks import ChunkRun
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.format.packed import PackedFiles, PackedMeta
from gangline_ckpt_zarr.load import scan
from gangline_ckpt_zarr.load.scan import Window, read_windows
from gangline_ckpt_zarr.stores.open import open_store

PLACE = "step-00000012"


def named(run: ChunkRun, number: int, path: str) -> str:
    box = run.chunk_box(number)
    limits = ", ".join(f"{start}:{start + length}" for start, length in zip(box.offset, box.shape, strict=True))
    return f"{run.name}[{limits}] in {path} is damaged"


@pytest.fixture
def made(tmp_path: Path):
    return tmp_path / PLACE, save(str(tmp_path / PLACE), small())


def verified(place: Path | str, capsys) -> tuple[int, str]:
    code = main(["ckpt", "verify", str(place)])
    return code, capsys.readouterr().out


def test_verify_reports_good_checkpoint(made, capsys):
    place, meta = made
    code, out = verified(place, capsys)
    count = sum(run.count for rank in range(4) for run in meta.files.get_rank_file(rank).runs)
    assert code == 0
    assert f"good ({count} chunks, " in out
    assert "1 copy: all good; " in out


def test_verify_names_every_damaged_chunk(made, capsys):
    place, meta = made
    draw = random.Random(0)
    for rank in range(meta.registry.mesh.world):
        path = place / meta.get_file_path(rank)
        for run in meta.files.get_rank_file(rank).runs:
            for number in range(run.count):
                content = bytearray(path.read_bytes())
                content[run.base + number * run.stride + draw.randrange(run.nbytes + TRAILER)] ^= 1 << draw.randrange(8)
                kept = path.read_bytes()
                path.write_bytes(content)
                code, out = verified(place, capsys)
                path.write_bytes(kept)
                assert code == 1
                assert f"{named(run, number, str(path))}: " in out
                assert "1 bad chunk " in out


def test_verify_ignores_padding(made, capsys):
    place, meta = made
    for rank in range(meta.registry.mesh.world):
        file, path = meta.files.get_rank_file(rank), place / meta.get_file_path(rank)
        content = bytearray(b"\xff" * file.size)
        for run in file.runs:
            for start in range(run.base, run.end, run.stride):
                content[start : start + run.nbytes + TRAILER] = path.read_bytes()[start : start + run.nbytes + TRAILER]
        path.write_bytes(content)
    assert verified(place, capsys)[0] == 0


def test_verify_lists_arrays_of_missing_file(made, capsys):
    place, meta = made
    (place / meta.get_file_path(1)).unlink()
    code, out = verified(place, capsys)
    assert code == 1
    for run in meta.files.get_rank_file(1).runs:
        assert f"{run.name}[" in out or not run.box.shape
    assert out.count("the file is missing") == len(meta.files.get_rank_file(1).runs)


def test_verify_reports_chunks_beyond_truncation(made, capsys):
    place, meta = made
    path, file = place / meta.get_file_path(0), meta.files.get_rank_file(0)
    last = file.runs[-1]
    with path.open("r+b") as opened:
        opened.truncate(last.base + 1)
    code, out = verified(place, capsys)
    assert code == 1
    assert out.count("is damaged") == 1
    assert f"the file has {last.base + 1:,} bytes instead of {file.size:,}" in out


@pytest.mark.parametrize("nbytes", [-1, 8])
@pytest.mark.parametrize("kind", ["packed", "native"])
def test_commands_refuse_file_of_wrong_size(tmp_path, capsys, kind, nbytes):
    run = run_dir(tmp_path / "run")
    older, newer = run / "checkpoints" / "step-00000004", run / "checkpoints" / PLACE
    save(str(older), small(1))
    save(str(newer if kind == "packed" else tmp_path / PLACE), small(1))
    if kind == "native":
        assert main(["ckpt", "copy", str(tmp_path / PLACE), str(newer), "--open"]) == 0
    path = next(newer.glob("data-*/*.bin")) if kind == "packed" else newer / "model" / "bias" / "c" / "0"
    size = path.stat().st_size
    os.truncate(path, size + nbytes)
    capsys.readouterr()
    for command in (["ls"], ["verify"], ["prune", "--keep-last", "1"], ["copy", str(tmp_path / "to")]):
        verb, *words = command
        assert main(["ckpt", verb, str(run), *words]) != 0, verb
        said = capsys.readouterr()
        assert f"has {size + nbytes:,} bytes instead of {size:,}" in said.out + said.err, verb
    assert older.exists()
    assert newer.exists()


def test_a_damaged_zarr_json_is_named(made, capsys):
    place, _ = made
    path = place / NAME
    path.write_bytes(path.read_bytes().replace(b'"0badcafe"', b'"1badcafe"'))
    code, out = verified(place, capsys)
    assert code == 1
    assert f"{path} is damaged: its checksum differs" in out


def test_verify_all_checks_every_copy(tmp_path, capsys):
    run = run_dir(tmp_path / "a", durable=tmp_path / "kept")
    for place in (run / "checkpoints" / "step-00000001", run / "checkpoints" / PLACE, tmp_path / "kept" / PLACE):
        meta = save(str(place), small())
    assert main(["ckpt", "verify", str(run), "--all"]) == 0
    assert "3 copies: all good" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(run), PLACE, "--all"]) == 0
    assert "2 copies: all good" in capsys.readouterr().out
    (tmp_path / "kept" / PLACE / meta.get_file_path(0)).unlink()
    assert main(["ckpt", "verify", str(run)]) == 0
    assert main(["ckpt", "verify", str(run), "--tier", "durable"]) == 1
    assert main(["ckpt", "verify", str(run), "--all", "--tier", "disk"]) == 0
    capsys.readouterr()
    assert main(["ckpt", "verify", str(run), "--all"]) == 1
    assert "3 copies: 1 damaged" in capsys.readouterr().out


def test_verify_reads_remote_store(capsys):
    store = open_store(f"memory://verify/{PLACE}")
    meta = save(store, small())
    assert verified(f"memory://verify/{PLACE}", capsys)[0] == 0
    store.delete(meta.get_file_path(2))
    assert verified("memory://verify", capsys)[0] == 1


@settings(max_examples=60, deadline=None)
@given(registries(4), st.integers(1, 300), st.data())
def test_scan_result_is_independent_of_window_length(registry: Registry, length: int, data) -> None:
    """Split each file into windows of any length; a chunk may begin, end and have its checksum in three windows."""
    files = PackedFiles(registry)
    meta = PackedMeta({}, registry, files, "0badcafe")
    for rank, content in staged(registry).items():
        file = files.get_rank_file(rank)
        chunks = [(run, number) for run in file.runs for number in range(run.count)]
        if not chunks:
            continue
        flipped = data.draw(st.sets(st.sampled_from(range(len(chunks))), max_size=3))
        for chunk in flipped:
            run, number = chunks[chunk]
            at = run.base + number * run.stride + data.draw(st.integers(0, run.nbytes + TRAILER - 1))
            content[at] ^= 0x10
        check, found = FileScanner(file, meta, file.size), []
        for start in range(0, file.size, length):
            part = memoryview(content)[start : start + length]
            found += check.feed(Window(start, len(part), part))
        assert [(bad.run, bad.number) for bad in found] == [chunks[chunk] for chunk in sorted(flipped)]


def test_scan_reports_only_unreadable_chunks(tmp_path, monkeypatch) -> None:
    """Raise a disk error for the second window of the file."""
    registry = Registry.of(Mesh.of({}), {f"model/{n}": Layout((700,), "float32") for n in range(9)})
    store = open_store(str(tmp_path))
    meta = save(store, registry)
    file, length = meta.files.get_rank_file(0), 8192
    monkeypatch.setattr(scan, "LOCAL", length)
    read = store.read_into

    def fails(path, ranges):
        if ranges[0][0] == length:
            raise OSError(5, "Input/output error")
        read(path, ranges)

    monkeypatch.setattr(store, "read_into", fails)
    check, found = FileScanner(file, meta, file.size), []
    for window in read_windows(store, meta.get_file_path(0), file.size):
        found += check.feed(window)
    touched = [run for run in file.runs if run.base < 2 * length and run.base + run.nbytes + TRAILER > length]
    assert [bad.run for bad in found] == touched
    assert all("Input/output error" in bad.why for bad in found)


def test_fully_damaged_array_is_reported_in_one_line() -> None:
    registry = Registry.of(Mesh.of({}), {"model/w": Layout((5000, 1000), "float32")})
    run = PackedFiles(registry).get_rank_file(0).runs[0]
    assert run.count > 2
    every = [BadChunks(run, number, "x") for number in range(run.count)]
    assert [(bad.number, bad.box) for bad in merge_runs(every)] == [(None, ((0, 5000), (0, 1000)))]
    assert list(merge_runs(every[1:])) == every[1:]
