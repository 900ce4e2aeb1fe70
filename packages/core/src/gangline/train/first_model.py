"""What data sources may ask of the model before they are read: the likelihood of samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gangline.data.base import FirstModel, Sample
from gangline.data.expand import expand
from gangline.data.sample_reader import KeptMemory, stacked
from gangline.runtime import Runtime
from gangline.train.build import sources_of
from gangline.train.session import Session


def introduce(s: Session) -> None:
    """Let each source of the run ask. Called on all ranks."""

    def score(samples: Sequence[Sample]) -> np.ndarray:
        return scored(s.runtime, samples, s.device)

    model = FirstModel(score, s.directory.path, s.step, writes=s.comms.rank == 0)
    for source in sources_of(s).values():
        source.begin(model)


def scored(runtime: Runtime, samples: Sequence[Sample], device: torch.device) -> np.ndarray:
    """(n,) float64: the log-likelihood of each sample, which all ranks give alike. Each rank computes its share."""
    index, width = runtime.data_coordinate
    share = -(-len(samples) // width)
    batches = []
    for number in range(index * share, (index + 1) * share):
        sample = samples[min(number, len(samples) - 1)]
        stored = stacked([sample], [number], KeptMemory(device))
        stored.counted = None if number < len(samples) else 0  # fills the share up
        batches.append(expand(stored, 0, device))
    return runtime.score(batches).numpy()[: len(samples)]
