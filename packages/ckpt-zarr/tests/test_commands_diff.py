"""`gangline ckpt diff`: differing arrays of two checkpoints, and the size of each difference."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from made import cut, run_dir, save, small, whole

from gangline.cli.main import main
from gangline.mesh import Mesh
from gangline.shard import Division, Layout, Registry
from gangline_ckpt_zarr.commands import diff
from gangline_ckpt_zarr.commands.diff import Difference
from gangline_ckpt_zarr.commands.where import find_place

DOCUMENT = {"step": 12, "attempt": 1, "cursor": 48, "mesh": {"tp": 2}, "states": {"optimizer": {"count": 12}}}


def differing(capsys, *words: str) -> tuple[int, dict[str, list[str]], str]:
    """Run `ckpt diff`; return (exit code, the row of each array, all output)."""
    code = main(["ckpt", "diff", *map(str, words)])
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line[:6] in ("model/", "state/")}
    return code, rows, out


@pytest.fixture
def first(tmp_path):
    save(str(tmp_path / "a"), small(), document=DOCUMENT)
    return tmp_path / "a"


def test_the_same_state_in_two_layouts_is_equal(first, tmp_path, capsys):
    save(
        str(tmp_path / "b"), small(3), document={**DOCUMENT, "mesh": {"dp_shard": 3}, "attempt": 2}, write_id="12345678"
    )
    code, rows, out = differing(capsys, first, tmp_path / "b")
    assert (code, rows) == (0, {})
    assert "document: mesh.tp: 2 -> (none)" in out
    assert out.endswith(f"{len(small().layouts)} arrays equal, 0 different\n")


def test_diff_reports_magnitude_of_each_differing_array(first, tmp_path, capsys):
    def values(name: str, layout: Layout) -> torch.Tensor:
        found = whole(name, layout).clone()
        if name == "model/blocks.1.w":
            found[59, 31] += 0.5
            found[0, 0] -= 2.0
        if name == "state/mask":
            found[0, 0] = not found[0, 0]
        return found

    save(str(tmp_path / "b"), small(1), values, DOCUMENT)
    code, rows, out = differing(capsys, first, tmp_path / "b")
    assert code == 1
    assert rows == {"model/blocks.1.w": ["2", "2", "of", "1,920"], "state/mask": ["1", "1", "of", "25"]}
    assert "6 arrays equal, 2 different" in out


def test_diff_reports_names_shapes_and_dtypes(first, tmp_path, capsys):
    layouts = dict(small().layouts)
    layouts["model/new"] = layouts.pop("model/bias")
    layouts["model/columns"] = Layout((8, 25))
    layouts["model/half"] = Layout((12, 4), "float32")
    save(str(tmp_path / "b"), Registry.of(small().mesh, layouts), document=DOCUMENT)
    code, rows, _ = differing(capsys, first, tmp_path / "b")
    assert code == 1
    assert rows == {
        "model/bias": ["only", "in", "a"],
        "model/new": ["only", "in", "b"],
        "model/columns": ["8×24", "in", "a,", "8×25", "in", "b"],
        "model/half": ["0", "0", "of", "48", "bfloat16", "in", "a,", "float32", "in", "b"],
    }


def test_diff_counts_training_state_but_not_config(first, tmp_path, capsys):
    for number, (change, code) in enumerate(
        [({"cursor": 52}, 1), ({"states": {"optimizer": {"count": 13}}}, 1), ({"config": {"a": 1}}, 0)]
    ):
        save(str(tmp_path / str(number)), small(), document={**DOCUMENT, **change})
        found, rows, out = differing(capsys, first, tmp_path / str(number))
        assert (found, rows) == (code, {})
        assert "document: " in out


def test_diff_accepts_two_steps_of_one_run(tmp_path, capsys):
    run = run_dir(tmp_path / "run")
    for step in ("step-00000001", "step-00000002"):
        save(str(run / "checkpoints" / step), small())
    code, rows, out = differing(capsys, run, "step-00000001", "step-00000002")
    assert (code, rows) == (1, {})
    assert "document: step: 1 -> 2" in out
    assert main(["ckpt", "diff", str(run)]) == 2
    assert "needs two checkpoints, got 1" in capsys.readouterr().err


def test_diff_reports_damaged_chunk(first, tmp_path, capsys):
    meta = save(str(tmp_path / "b"), small(), document=DOCUMENT)
    path = tmp_path / "b" / meta.get_file_path(0)
    content = bytearray(path.read_bytes())
    content[meta.files.get_rank_file(0).runs[0].base] ^= 1
    path.write_bytes(content)
    code, _, out = differing(capsys, first, tmp_path / "b")
    assert code == 1
    assert "is damaged: its checksum differs" in out


def by_hand(a: np.ndarray, b: np.ndarray) -> tuple[float, int]:
    """Compute (largest difference, number of differing elements) one element at a time with Python numbers."""
    largest, count = 0.0, 0
    for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True):
        if x != y and not (x != x and y != y):
            count += 1
            largest = math.nan if math.isnan(largest) or math.isnan(x - y) else max(largest, float(abs(x - y)))
    return largest, count


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["float32", "float64", "int64", "uint8", "bool"]), st.data())
def test_difference_matches_elementwise_reference(dtype: str, data) -> None:
    a, b = (data.draw(arrays.arrays(dtype, 4)) for _ in range(2))
    found = Difference()
    found.add(a[:2], b[:2])
    found.add(a[2:], b[2:])
    largest, count = by_hand(a, b)
    assert found.count == count
    assert found.largest == largest or (math.isnan(largest) and math.isnan(found.largest))


def test_diff_of_large_array_uses_bounded_memory(tmp_path, monkeypatch, capsys):
    """Compare an array of 16 MiB, sharded by rows in one checkpoint and by columns in the other, in less than 9 MiB."""
    monkeypatch.setattr(diff, "BLOCK", 1 << 18)
    shape = (2048, 2048)
    for name, dim in (("a", 0), ("b", 1)):
        division = Division(("tp",), cut(shape[dim], 8), dim)
        registry = Registry.of(Mesh.of({"tp": 8}), {"model/w": Layout(shape, "float32", (division,))})
        save(str(tmp_path / name), registry)
    tracemalloc.start()
    code, rows, _ = differing(capsys, tmp_path / "a", tmp_path / "b")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (code, rows) == (0, {})
    assert peak < 9 << 20, peak


def test_diff_blocks_align_with_chunks_and_tile_array(tmp_path):
    registry = Registry.of(Mesh.of({}), {"model/w": Layout((5000, 1000), "float32")})
    save(str(tmp_path), registry)
    meta = find_place([str(tmp_path)]).copy().meta
    boxes = list(diff._split_into_blocks(meta, "model/w"))
    chunk = meta.files.chunk("model/w")
    assert sum(box.size for box in boxes) == 5000 * 1000
    assert all(start % side == 0 for box in boxes for start, side in zip(box.offset, chunk, strict=True))
