"""Small runs of one model on several layouts by the real command, and their loss curves from `metrics.jsonl`.

Each curve is compared with that of one process.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from gangline_testkit import RealRuns

TIMEOUT = 900  # timeout of one command in seconds; its eight processes may share a busy machine
STEPS = 6
LONGEST = 28  # steps of the reference run, enough for every resumed run
RELATIVE = 2e-5  # tolerance in float32 over 28 steps of AdamW; measured: losses 2e-7, gradient norms 2e-6
SETTINGS = (
    "model=tiny",
    "model.dim=32",
    "model.heads=4",
    "model.ffn_dim=64",
    "batch.global_size=8",
    "batch.sequence_length=16",
    "schedule=constant",  # a learning rate that depends on run.steps would change the curve of shorter runs
    "schedule.warmup_steps=2",
    "validate.every=2",
    "validate.samples=16",
    "run.sample=0",
    "track=[jsonl]",
    "track.jsonl.figure=false",
)


class Curves(RealRuns):
    """Runs in one directory, of `STEPS` steps unless `run.steps` is given."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, (*SETTINGS, f"run.steps={STEPS}"), seconds=TIMEOUT)
        self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    @cached_property
    def alone(self) -> list[dict]:
        """Records of the reference run: one process, `LONGEST` steps."""
        self.train("run.dir=alone", f"run.steps={LONGEST}")
        return self.read_records("alone")


def same(found: list[dict], expected: list[dict]) -> None:
    """Check that two runs have the same steps, learning rates, losses, gradient norms, tokens and validation losses."""
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for name in ("learning_rate", "loss", "grad_norm", "validation_loss"):
        for one, other in zip(found, expected, strict=True):
            got, want = one.get(name), other.get(name)
            assert (got is None) == (want is None), f"{name} of step {one['step']} is {got!r}, expected {want!r}"
            if want is not None:
                assert abs(got - want) <= RELATIVE * abs(want), f"{name} of step {one['step']}: {got!r}, not {want!r}"
    assert [record["tokens"] for record in found] == [record["tokens"] for record in expected]
