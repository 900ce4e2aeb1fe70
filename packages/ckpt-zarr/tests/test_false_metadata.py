"""zarr.json with a valid checksum and invalid content: refused within time and memory limits, no traceback."""

from __future__ import annotations

import copy
import io
import json
import os
import time
import tracemalloc
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings, strategies as st
from made import save, small

from gangline.checkpoint.id import CheckpointId
from gangline.errors import BadCheckpoint, UserError
from gangline.shard import Box
from gangline_ckpt_zarr.commands import show
from gangline_ckpt_zarr.commands.listing import list_checkpoints
from gangline_ckpt_zarr.commands.verify import check_copy
from gangline_ckpt_zarr.commands.where import Copy
from gangline_ckpt_zarr.format import packed
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.format.packed import PackedFiles
from gangline_ckpt_zarr.load.read_plan import Target, plan_reads
from gangline_ckpt_zarr.stores.open import open_store
from gangline_ckpt_zarr.tiers.stored import StoreTier

SECONDS, BYTES = 5.0, 256 << 20  # maximum CPU time and memory for one document; valid documents take 0.02 s and 1 MB
PLACE = "step-00000012"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("run") / PLACE
    save(str(found), small())
    return found


def said(place: Path) -> dict[str, Any]:
    return json.loads((place / NAME).read_bytes())


def forged(content: Any) -> bytes:
    """Return the document as JSON, with a valid checksum if the document has a place for one."""
    try:
        ours = content["attributes"]["gangline"]
        ours.pop("checksum", None)
        ours["checksum"] = 0
    except (KeyError, TypeError, AttributeError):
        pass
    text = json.dumps(content, separators=(",", ":")).encode()
    signature = b'"checksum":%d}},"consolidated_metadata":'
    return text.replace(signature % 0, signature % crc32c(text))


def looked_at(place: Path, content: bytes) -> str | None:
    """Read this zarr.json with every reader of checkpoints, within the limits.

    Return why the checkpoint is bad, or None if every reader accepts it.
    """
    kept = (place / NAME).read_bytes()
    tracemalloc.start()
    began = time.process_time()
    try:
        (place / NAME).write_bytes(content)
        return _looked_at(place)
    finally:
        seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        (place / NAME).write_bytes(kept)
        assert seconds < SECONDS
        assert peak < BYTES


def _looked_at(place: Path) -> str | None:
    found = Copy(PLACE, "disk", open_store(str(place)))
    (entry,) = list_checkpoints(open_store(str(place.parent)))
    state = entry.state(StoreTier("disk", open_store(str(place.parent))))
    bad = check_copy(found)[0]
    assert bad or not state.startswith("damaged"), "verify sees what ls does, and more"
    try:
        with redirect_stdout(io.StringIO()):
            show.run([str(place)])
        meta = found.check_sizes()
        for name, layout in meta.registry.layouts.items():
            plan_reads(meta, [Target(name, Box((0,) * len(layout.shape), layout.shape), None)])  # type: ignore[arg-type]
    except (BadCheckpoint, UserError):
        assert bad
    return str(bad[0]) if bad else None


def test_valid_zarr_json_passes(place):
    assert looked_at(place, forged(said(place))) is None


def array(content: dict[str, Any], name: str = "model/columns") -> dict[str, Any]:
    return content["consolidated_metadata"]["metadata"][name]


def ours(content: dict[str, Any]) -> dict[str, Any]:
    return content["attributes"]["gangline"]


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


CLAIMS = {
    "chunks of no size": lambda c: array(c)["chunk_grid"]["configuration"].update(chunk_shape=[0, 12]),
    "chunks beyond the array": lambda c: array(c)["chunk_grid"]["configuration"].update(chunk_shape=[8, 10**12]),
    "chunks that a cut goes through": lambda c: array(c)["chunk_grid"]["configuration"].update(chunk_shape=[8, 9]),
    "half a row": lambda c: array(c).update(shape=[8.0, 24]),
    "less than nothing": lambda c: array(c).update(shape=[-8, 24]),
    "no shape": lambda c: array(c).update(shape=8),
    "10^15 elements": lambda c: array(c, "model/bias").update(shape=[10**15]),
    "10^15 elements, cut": lambda c: array(c).update(shape=[10**15, 24]),
    "another shape for zarr": lambda c: array(c, "model/bias")["attributes"].update(dtype="float32"),
    "no dtype": lambda c: array(c)["attributes"].update(dtype="none"),
    "an array beside": lambda c: c["consolidated_metadata"]["metadata"].update({"model/more": array(c)}),
    "a way out": lambda c: (
        c["consolidated_metadata"]["metadata"].update({"../../x": array(c)}),
        ours(c)["layout"]["arrays"].update({"../../x": ours(c)["layout"]["arrays"]["model/columns"]}),
    ),
    "10^9 ranks": lambda c: ours(c)["layout"]["mesh"].update(dp_shard=10**9),
    "10^9 replicas": lambda c: ours(c)["layout"]["mesh"].update(dp_replicate=10**9),
    "10^9 parts": lambda c: ours(c)["layout"]["cuts"][0].update(
        divisions=[{"axes": ["tp"], "bounds": [{"step": 1, "end": 10**9, "parts": 10**9}]}]
    ),
    "bounds that go down": lambda c: ours(c)["layout"]["cuts"][0].update(
        divisions=[{"axes": ["tp"], "bounds": [[0, 40, 20]]}]
    ),
    "half a rank": lambda c: ours(c)["layout"]["mesh"].update(dp_shard=2.5),
    "no such cut": lambda c: ours(c)["layout"]["arrays"].update({"model/columns": [-1, 0]}),
    "another step": lambda c: ours(c)["document"].update(step=13),
    "another attempt": lambda c: ours(c)["document"].update(attempt=2),
    "no step": lambda c: ours(c)["document"].pop("step"),
    "a document that is none": lambda c: ours(c).update(document=[1]),
    "a deep document": lambda c: ours(c)["document"].update(states=nested(200)),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_zarr_json_with_invalid_value_is_refused(place, claim):
    content = said(place)
    CLAIMS[claim](content)
    why = looked_at(place, forged(content))
    assert why is not None
    assert f"{place}" in why, "the file is named"


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 4096, b"[" * 200_000, b'{"a":' * 200_000, b"nan", b"\xff"])
def test_malformed_zarr_json_is_reported_as_damaged(place, content):
    assert looked_at(place, content) is not None


def test_terabyte_zarr_json_is_not_read(place):
    content = (place / NAME).read_bytes()
    os.truncate(place / NAME, 1 << 40)  # a sparse file, without more blocks on disk
    try:
        with pytest.raises(BadCheckpoint, match="1,099,511,627,776 bytes"):
            StoreTier("disk", open_store(str(place.parent))).read_meta(CheckpointId(12))
        assert len(check_copy(Copy(PLACE, "disk", open_store(str(place))))[0]) == 1
    finally:
        (place / NAME).write_bytes(content)


ODD = st.sampled_from(
    [0, 1, 2, 3, 7, 12, -1, 1.5, 10**9, 10**15, 1 << 63, 10**30, True, None, "", "x", "../x", "float64", float("nan")]
) | st.builds(lambda: [])


def steps(content: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a document."""
    found, below = [], [content]
    while below:
        one = below.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one))
        found += [(one, key) for key in keys]
        below += [one[key] for key in keys if isinstance(one[key], dict | list)]
    return found


def fuzz(place: Path, data: st.DataObject) -> None:
    content = copy.deepcopy(said(place))
    for _ in range(data.draw(st.integers(1, 3))):
        places = steps(content)
        where, key = places[data.draw(st.integers(0, len(places) - 1))]
        way = data.draw(st.sampled_from(["odd", "odd", "gone", "twice", "like another"]))
        if way == "odd":
            where[key] = copy.deepcopy(data.draw(ODD))
        elif way == "gone":
            del where[key]
        elif isinstance(where, list):
            where.append(copy.deepcopy(where[key]))
        elif way == "like another":
            other, name = places[data.draw(st.integers(0, len(places) - 1))]
            where[key] = copy.deepcopy(other[name])
    looked_at(place, forged(content))


MANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=80, **MANY)
@given(st.data())
def test_fuzzed_zarr_json_stays_within_limits(place, data):
    fuzz(place, data)


@pytest.mark.nightly
@settings(max_examples=2000, **MANY)
@given(st.data())
def test_nightly_fuzzing_of_zarr_json_stays_within_limits(place, data):
    fuzz(place, data)


def test_write_refuses_deeply_nested_document():
    registry = small()
    deep = {"step": 1, "attempt": 1, "states": nested(100)}
    with pytest.raises(ValueError, match="nested more than"):
        packed.write(registry, PackedFiles(registry), deep, "0badcafe")
