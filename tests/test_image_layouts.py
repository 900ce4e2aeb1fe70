"""Image samples and the model edit `patches` on several processes: the loss curve of one process."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from curves import SETTINGS, TIMEOUT, same

from gangline_testkit import RealRuns, as_installed

ROOT = Path(__file__).resolve().parent.parent
IMAGES = (
    "patches=on", "data=dali_images", "data.path=shards", "data.side=32", "data.places=16", "batch.sequence_length=32",
    "data.validation_fraction=0.1", "run.steps=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[RealRuns]:
    """Write a shard of images with texts; yield runs with an edit that embeds images."""
    image = pytest.importorskip("PIL.Image", reason="the images are written by Pillow")
    folder: Path = tmp_path_factory.mktemp("images")
    (folder / "shards").mkdir()
    draws = np.random.default_rng(1)
    with tarfile.open(folder / "shards" / "0.tar", "w") as tar:
        for number in range(40):
            file = io.BytesIO()
            image.fromarray(draws.integers(0, 255, (40, 36, 3), np.uint8)).save(file, "PNG")
            for kind, content in (("png", file.getvalue()), ("txt", f"picture {number}".encode())):
                member = tarfile.TarInfo(f"{number:06d}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    edit = as_installed("gangline-patches", "patches", path=ROOT / "packages" / "dataloader" / "tests")
    with edit, RealRuns(folder, seconds=TIMEOUT) as found:
        found.settings = (*SETTINGS, *IMAGES)
        found.train("run.dir=alone", "parallel=single")
        yield found


@pytest.mark.parametrize(
    "words",
    [("parallel=fsdp",), ("parallel=pp",), ("parallel=tp", "parallel.sequence_parallel=false")],
    ids=["fsdp", "pp", "tp"],
)
def test_image_training_matches_one_process(runs, words):
    runs.train(f"run.dir={words[0]}", *words, "launch.processes=2")
    same(runs.read_records(words[0]), runs.read_records("alone"))


def test_patches_edit_refuses_sharded_sequences(runs):
    assert "patches=on does not know sequences that are cut" in runs.train(
        "run.dir=cut", "parallel=tp", "launch.processes=2", code=2
    )
