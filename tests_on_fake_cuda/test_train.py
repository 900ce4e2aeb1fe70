"""`train` as a whole on the fake device: data, validation, checkpoints and resumption, with the numbers of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layouts import CPU, CUDA

from gangline.comm.transport import connect
from gangline.mesh import Mesh
from gangline.run.directory import RunDirectory
from gangline.train.build import build
from gangline.train.rank import train
from gangline_testkit.fake_cuda.watch import Watch
from gangline_testkit.runs import build_small_run
from gangline_testkit.sessions import SETTINGS, TEXT, read_lines

RUN = (*SETTINGS, TEXT, "checkpoint=zarr", "checkpoint.every=3", "validate.every=3", "run.steps=6", "precision=fp32")

# Waits of the run for the device: at the start, in 6 steps, 2 validations of 8 samples, and 2 saves.
WAITS = {
    "host to device, blocking at gangline/draws.py:draw": 22,
    "event.synchronize at gangline/train/batches.py:_wait_for_copies": 6,  # of the batch before, which is there
    "device to host, blocking at gangline_basics/parallel/metrics.py:_to_host": 6,
    "stream.synchronize at gangline/train/batches.py:read_held_out": 16,
    "device to host, blocking at gangline_basics/parallel/sample_losses.py:sum_evaluated": 2,
    "device to host, blocking at gangline/train/save.py:find_nonfinite_weights": 2,
    "stream.synchronize at gangline_ckpt_zarr/save/staging.py:fill": 2,
}


def train_on(device: torch.device, folder: Path, *settings: str) -> Watch:
    """Train in this process, or go on with the run in the folder."""
    run = build_small_run(*RUN, *settings, f"run.dir={folder}")
    if not folder.exists():
        RunDirectory.create(run).unlock()
    mesh = Mesh.of({})
    comms = connect(mesh, device=device, deterministic=run.deterministic)
    with Watch() as watch:
        assert train(build(run, RunDirectory.open(str(folder)), mesh, comms, device)) == 0
    return watch


def read_numbers(folder: Path, name: str = "loss") -> dict[int, float]:
    """Return a number of each step that has it."""
    return {line["step"]: line[name] for line in read_lines(folder, "metrics.jsonl") if line.get(name) is not None}


def test_a_run_with_checkpoints_gives_the_losses_of_the_cpu(tmp_path: Path) -> None:
    watch = train_on(CUDA, tmp_path / "cuda")
    train_on(CPU, tmp_path / "cpu")
    for name, steps in (("loss", [*range(1, 7)]), ("grad_norm", [*range(1, 7)]), ("validation_loss", [3, 6])):
        ours = read_numbers(tmp_path / "cuda", name)
        assert [*ours] == steps
        assert ours == pytest.approx(read_numbers(tmp_path / "cpu", name), rel=1e-5)
    assert sum(watch.kernels.values()) > 1000
    assert watch.waits == WAITS


def test_a_checkpoint_of_the_device_goes_on_on_the_cpu_and_back(tmp_path: Path) -> None:
    train_on(CUDA, tmp_path / "run", "run.steps=3")
    train_on(CPU, tmp_path / "whole")
    train_on(CPU, tmp_path / "run", "run.steps=5")
    train_on(CUDA, tmp_path / "run")
    assert read_numbers(tmp_path / "run") == pytest.approx(read_numbers(tmp_path / "whole"), rel=1e-5)
