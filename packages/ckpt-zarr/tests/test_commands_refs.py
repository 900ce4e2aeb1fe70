"""`gangline ckpt refs`: stock zarr opens a checkpoint through the printed references."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from layouts import registries
from made import save, small, whole

from gangline.cli.main import main
from gangline.shard import Registry
from gangline_ckpt_zarr.commands import refs
from gangline_ckpt_zarr.stores.open import open_store


def printed(capsys) -> Any:
    """Return the group that the printed line opens."""
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("zarr.open_group(")
    return eval(line, {"zarr": zarr})


def holds(group: Any, registry: Registry) -> bool:
    for name, layout in registry.layouts.items():
        array = group[name]
        assert array.shape == layout.shape
        assert array.attrs["dtype"] == layout.dtype
        assert np.array_equal(array[...], whole(name, layout).double().numpy())
    return len(registry.layouts) > 0


def test_zarr_reads_values_through_references(tmp_path, capsys):
    save(str(tmp_path / "step-00000012"), small())
    assert main(["ckpt", "refs", str(tmp_path)]) == 0
    group = printed(capsys)
    assert holds(group, small())
    assert sorted(name for name, _ in group.groups()) == ["model", "optimizer", "state"]


def test_refs_output_option_sets_reference_file(tmp_path, capsys):
    save(str(tmp_path / "step-00000012"), small())
    output = tmp_path / "out.json"
    assert main(["ckpt", "refs", str(tmp_path), "--output", str(output)]) == 0
    assert output.exists()
    assert not (tmp_path / "step-00000012" / "refs.json").exists()
    assert holds(printed(capsys), small())


def test_references_of_moved_checkpoint_open_with_override(tmp_path, capsys):
    save(str(tmp_path / "step-00000012"), small())
    main(["ckpt", "refs", str(tmp_path)])
    shutil.move(tmp_path / "step-00000012", tmp_path / "moved")
    options = {"fo": str(tmp_path / "moved" / "refs.json"), "template_overrides": {"at": str(tmp_path / "moved")}}
    assert holds(zarr.open_group("reference://", mode="r", storage_options=options), small())
    capsys.readouterr()
    assert main(["ckpt", "refs", str(tmp_path / "moved")]) == 0  # or write the references again, over the existing file
    assert holds(printed(capsys), small())


def test_references_of_remote_checkpoint_are_readable(capsys):
    save(open_store("memory://refs/step-00000012"), small())
    assert main(["ckpt", "refs", "memory://refs"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert '"remote_protocol": "memory", "remote_options": {"asynchronous": True}' in line
    options = {"fo": "memory://refs/step-00000012/refs.json", "remote_protocol": "memory"}
    assert holds(zarr.open_group("reference://", mode="r", storage_options=options), small())


def test_zarr_detects_damage_through_references(tmp_path, capsys):
    meta = save(str(tmp_path / "step-00000012"), small())
    main(["ckpt", "refs", str(tmp_path)])
    group = printed(capsys)
    path, run = tmp_path / "step-00000012" / meta.get_file_path(0), meta.files.get_rank_file(0).runs[0]
    content = bytearray(path.read_bytes())
    content[run.base] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        group[run.name][...]


@settings(max_examples=12, deadline=None)
@given(registries(6))
def test_references_of_any_layout_are_readable(tmp_path_factory, registry: Registry) -> None:
    place: Path = tmp_path_factory.mktemp("any") / "step-00000001"
    save(str(place), registry)
    assert main(["ckpt", "refs", str(place)]) == 0
    options = {"fo": str(place / refs.REFERENCES)}
    assert holds(zarr.open_group("reference://", mode="r", storage_options=options), registry)
