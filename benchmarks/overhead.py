"""Measure the overhead of the training loop over the same model in a bare PyTorch loop, in CPU seconds.

Both train the same model of about 6 M parameters on the same batches in one process, in alternating turns of a few
steps; their losses must be bitwise equal. The loop writes its default metrics (console, jsonl, tensorboard). Goal: at
most 1.02.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import torch
from bare_loop import BareLoop

from gangline.comm.transport import connect
from gangline.config.defaults import build_default_run
from gangline.mesh import Mesh
from gangline.plugin.registry import build
from gangline.record import StepRecord
from gangline.run.directory import RunDirectory
from gangline.track import Tracker
from gangline.train.build import build as build_session
from gangline.train.loop import run_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="steps per turn")
    options = parser.parse_args()
    total = (options.turns + 1) * options.steps
    shape = {"dim": 256, "layers": 8, "heads": 8, "kv_heads": 4, "ffn_dim": 704}
    run = build_default_run(
        run={"steps": total, "dir": str(Path(tempfile.mkdtemp()) / "run"), "sample": 0},
        batch={"global_size": 4, "sequence_length": 128},
        validate={"every": None},
    )
    for name, value in shape.items():
        setattr(run.model, name, value)
    directory = RunDirectory.create(run)
    mesh, device = Mesh.of({}), torch.device("cpu")
    comms = connect(mesh, device=device, deterministic=False)
    session = build_session(run, directory, mesh, comms, device)
    session.reporter.begin(run, str(directory.path), 0, 1, 1)
    bare = BareLoop(run, build(run.data, run, "train"), build(run.schedule, run))
    ours, theirs, ratios = [], [], []
    losses: list[float] = []
    data: list[float] = []
    session.reporter.trackers["losses"] = Losses(losses, data)
    for turn in range(options.turns + 1):
        first = time.process_time()
        session.run.job.steps = (turn + 1) * options.steps
        with contextlib.redirect_stdout(io.StringIO()):
            run_steps(session)
        middle = time.process_time()
        expected = bare.train(options.steps)
        last = time.process_time()
        assert losses[-options.steps :] == expected, "the losses of the two loops differ"
        if turn:  # the first turn is a warm-up
            ours.append(middle - first)
            theirs.append(last - middle)
            ratios.append(ours[-1] / theirs[-1])
    print(f"model                {session.reporter.parameters / 1e6:.2f} M parameters, 512 tokens per step")
    print(f"bare loop            {statistics.median(theirs) / options.steps * 1e3:.1f} CPU ms per step")
    print(f"gangline             {statistics.median(ours) / options.steps * 1e3:.1f} CPU ms per step")
    print(f"ratio                {statistics.median(ratios):.3f} (median of {len(ratios)} turns; goal 1.02)")
    print(f"ratio of sums        {sum(ours) / sum(theirs):.3f}")
    print(f"data, share of step  {statistics.median(data):.4f} (goal 0.01)")


class Losses(Tracker):
    """A tracker that keeps the losses in memory."""

    def __init__(self, losses: list[float], data: list[float]) -> None:
        self.losses, self.data = losses, data

    def record(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        self.data.append(record.seconds["data"] / record.step_seconds)


if __name__ == "__main__":
    main()
