"""Hooks of checkpointers and data sources."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.plugin.hooks import hookspec
from gangline.plugin.parts import Part


@hookspec
def gangline_checkpointers() -> Iterable[Part]:
    """Offer ways to store the state of a run. Users choose one: ``checkpoint=<name>``.

    ::

        # gangline_elsewhere.py: torch's checkpoints, kept outside the run directory. train checkpoint=elsewhere
        from dataclasses import dataclass
        from pathlib import Path

        from gangline import Part, hookimpl
        from gangline_basics.checkpoint.config import TorchCheckpoint


        @dataclass
        class Elsewhere(TorchCheckpoint):
            folder: str = "/tmp"  # parent folder of the runs' checkpoint directories


        def build(config, run, store):
            from gangline_basics.checkpoint.torch_dcp import DcpCheckpointer

            checkpointer = DcpCheckpointer(run.job.dir, config.keep_last)
            checkpointer.directory = Path(config.folder) / Path(run.job.dir).name
            checkpointer.directory.mkdir(parents=True, exist_ok=True)
            return checkpointer


        @hookimpl
        def gangline_checkpointers():
            yield Part(name="elsewhere", config=Elsewhere, build="gangline_elsewhere:build", summary="Kept elsewhere")
    """
    return ()


@hookspec
def gangline_data_sources() -> Iterable[Part]:
    """Offer training data. Users choose one: ``data=<name>``.

    ::

        # gangline_counting.py: sequences that count upwards, each from a start of its own. train data=counting
        from dataclasses import dataclass

        import numpy as np

        from gangline import Part, hookimpl
        from gangline.config import DataConfig, PositiveInt
        from gangline.data.base import DataSource


        @dataclass
        class Counting(DataConfig):
            stride: PositiveInt = 1  # difference between neighbouring tokens


        class CountingSource(DataSource):
            def __init__(self, config, run, split):
                self.stride, self.modulus = config.stride, run.model.vocab_size
                self.sequence_length = run.batch.sequence_length
                self.first = 0 if split == "train" else 1

            def sample(self, i):
                start = 2 * i + self.first  # a pure function of (split, i): no state, no rank
                return {"tokens": (start + self.stride * np.arange(self.sequence_length + 1)) % self.modulus}

            def count_samples(self):
                return self.modulus // 2  # number of samples in an epoch; None: no end

            def compute_fingerprint(self):
                return f"counting-{self.stride}-{self.sequence_length}-{self.modulus}-{self.first}"


        @hookimpl
        def gangline_data_sources():
            yield Part(name="counting", config=Counting, build="gangline_counting:CountingSource", summary="Counts up")
    """
    return ()
