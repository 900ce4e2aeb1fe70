"""Training from plain Python, without the command line."""

from __future__ import annotations

import os
import subprocess
import sys

from gangline.run.directory import RunDirectory
from gangline_testkit.real_runs import write_small_text

SCRIPT = """
import sys
from gangline import api
from gangline.config.defaults import build_default_run
from gangline_basics.data.config import TextConfig
from gangline.errors import UserError
from gangline_basics.model.config import DecoderConfig
from gangline_basics.optimizer.config import Adamw

def run(**given):
    model = DecoderConfig(dim=32, layers=1, heads=2, ffn_dim=32)
    batch = {"global_size": 4, "sequence_length": 16}
    return build_default_run(model=model, data=TextConfig(path="corpus"), batch=batch, track=["jsonl"], **given)

if __name__ == "__main__":
    directory = api.train(run(run={"dir": "out", "steps": 2, "sample": 0}, validate={"every": None}))
    print(directory.path, len(directory.metrics.read_text().splitlines()), "hydra" in sys.modules)
    try:
        api.train(run(run={"dir": "out"}))
    except UserError as error:
        print(error)
    try:
        api.train(run(run={"dir": "other", "steps": 4, "sample": 0}, optimizer=Adamw(learning_rate=1e30)))
    except (api.RunFailed, UserError) as error:
        print(type(error).__name__)
"""


def test_a_run_is_trained_from_a_script(tmp_path):
    write_small_text(tmp_path / "corpus")
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "out 2 False"
    assert lines[1] == "out already holds a run."
    assert lines[-1] == "RunFailed"
    assert RunDirectory.open(tmp_path / "out").run().steps == 2
