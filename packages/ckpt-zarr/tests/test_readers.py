"""Checkpoints read by stock zarr, including the newest release.

The tests import no torch, because some of the Python versions that run them have no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from crc32c import crc32c

from gangline.cli.main import main
from gangline.mesh import Mesh
from gangline.shard import Division, Layout, Registry
from gangline_ckpt_zarr.format import packed
from gangline_ckpt_zarr.format.checksum import TRAILER, compute_seal, compute_seal_start
from gangline_ckpt_zarr.format.dtypes import map_dtype
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.format.packed import PackedFiles
from gangline_ckpt_zarr.format.views import make_views
from gangline_ckpt_zarr.stores.local import LocalStore

ID = "0badcafe"
ROWS = Division(("dp_shard",), ((0, 31, 62),), rows=True)
COLUMNS = Division(("tp",), ((0, 12, 24),), 1)
REGISTRY = Registry.of(
    Mesh.of({"dp_shard": 2, "tp": 2}),
    {
        "model/rows": Layout((62, 33), "float32", (ROWS,)),
        "model/both": Layout((62, 24), "float64", (COLUMNS, ROWS)),
        "model/half": Layout((5, 3), "bfloat16"),
        "model/stack": Layout((2, 31, 7), "float16", (ROWS,)),
        "model/bias": Layout((33,), "int64"),
        "state/mask": Layout((9, 2), "bool"),
        "state/count": Layout((), "int32"),
    },
)


def values(name: str) -> np.ndarray:
    """Return the stored values of an array, which bfloat16 represents exactly."""
    layout = REGISTRY[name]
    count = int(np.prod(layout.shape, dtype=np.int64))
    return (np.arange(count) * 7 % 127).astype(map_dtype(layout.dtype)).reshape(layout.shape)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "step-00000012"
    store, files = LocalStore(place), PackedFiles(REGISTRY)
    for rank in range(REGISTRY.mesh.world):
        file = files.get_rank_file(rank)
        content = np.zeros(file.size, np.uint8)
        for run in file.runs:
            whole = values(run.name)
            for view in make_views(run, whole.itemsize):
                strides = [step * whole.itemsize for step in view.strides]
                start = content[view.offset * whole.itemsize :].view(whole.dtype)
                chunks = np.lib.stride_tricks.as_strided(start, view.sizes, strides)
                chunks[...] = whole[run.box.slices][view.slices].reshape(view.sizes)
            seals = compute_seal_start(ID, run.name, run.box.offset)
            for number in range(run.count):
                end = run.base + number * run.stride + run.nbytes
                checksum = crc32c(content[end - run.nbytes : end])
                behind = checksum.to_bytes(4, "little") + compute_seal(seals, number, checksum).to_bytes(4, "little")
                content[end : end + TRAILER] = np.frombuffer(behind, np.uint8)
        writer = store.create(packed.get_data_path(ID, rank), file.size)
        writer.write(content.data)
        writer.close()
    store.commit(NAME, packed.write(REGISTRY, files, {"step": 12, "attempt": 1}, ID))
    return place


def shown(group: Any) -> None:
    for name in REGISTRY:
        assert np.array_equal(group[name][...], values(name)), name
        assert group[name].attrs["dtype"] == REGISTRY[name].dtype


def test_zarr_opens_packed_files_with_refs_line(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "refs", str(saved)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    shown(eval(line, {"zarr": zarr}))


def test_plain_zarr_group_lists_arrays_and_shapes(saved: Path) -> None:
    """Open the directory itself, without the references that array data needs."""
    group = zarr.open_group(str(saved), mode="r")
    assert {name: group[name].shape for name in REGISTRY} == {name: REGISTRY[name].shape for name in REGISTRY}


def test_an_open_copy_is_opened_by_path(saved: Path, tmp_path: Path) -> None:
    assert main(["ckpt", "copy", "--open", str(saved), str(tmp_path / "copy")]) == 0
    shown(zarr.open_group(str(tmp_path / "copy"), mode="r"))
