"""Data source, tracker and launcher of `own_parts`. Torch-free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from gangline.data.base import DataSource
from gangline.launch.base import Launcher
from gangline.track import Tracker


class StepsSource(DataSource):
    def __init__(self, config, run, split):
        self.modulus, self.tokens, self.seed = run.model.vocab_size, run.batch.sequence_length + 1, run.seed
        self.split = split

    def sample(self, i):
        draws = np.random.default_rng((self.seed, self.split == "train", i)).integers(1, 3, self.tokens)
        return {"tokens": np.cumsum(draws) % self.modulus}

    def count_samples(self):
        return 64

    def compute_fingerprint(self):
        return f"steps-{self.modulus}-{self.tokens}-{self.seed}-{self.split}"


class QuietTracker(Tracker):
    """Tracker that writes a line of JSON for each step."""

    def __init__(self, config, run):
        self.path = Path(run.job.dir, "losses.jsonl")

    def record(self, record):
        with self.path.open("a") as file:
            file.write(json.dumps([record.step, record.loss]) + "\n")


class HereLauncher(Launcher):
    """Launcher that runs the single rank in its own process."""

    def __init__(self, config, run):
        pass

    def launch(self, directory):
        code = f"import sys\nfrom gangline.train.rank import train_rank\nsys.exit(train_rank({str(directory.path)!r}))"
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        return subprocess.run([sys.executable, "-c", code], env={**os.environ, **alone}).returncode
