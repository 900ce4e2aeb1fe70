"""Initial model for data sources: log-likelihoods of samples, before the first sample is read."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from gangline.data.base import ReferenceModel
from gangline.data.expand import expand
from gangline.data.sample import Sample
from gangline.data.sample_reader import KeptMemory, stack_samples
from gangline.launch.signals import stop_requested
from gangline.runtime import Runtime
from gangline.train.agree import agree
from gangline.train.begin_with_weights import find_parent
from gangline.train.build import list_sources
from gangline.train.session import Session

SECONDS = 10.0  # seconds between progress lines of a source


class _StopAskedError(Exception):
    """Error that ends `begin` of a source: a rank got the stop signal of this name."""


def introduce(s: Session) -> str | None:
    """Call `begin` of each source; return the name of a signal that interrupted it. Equal on all ranks."""
    last_time = time.monotonic()

    def score(samples: Sequence[Sample], losses_per_sample: int = 1) -> np.ndarray:
        if signal := agree(s.comms.world, 0.0, stop_requested(), [], False).signal:
            raise _StopAskedError(signal)
        return score_samples(s.runtime, samples, s.device, losses_per_sample)

    def tell(what: str) -> None:
        nonlocal last_time
        if s.comms.rank == 0 and time.monotonic() - last_time >= SECONDS:
            last_time = time.monotonic()
            print(f"before the first step: {what}", flush=True)

    model = ReferenceModel(
        score, s.directory.path, s.step, writes=s.comms.rank == 0, tell=tell, parent=find_parent(s.directory)
    )
    try:
        for source in list_sources(s).values():
            source.begin(model)
    except _StopAskedError as stopped:
        return str(stopped)
    return None


def score_samples(
    runtime: Runtime, samples: Sequence[Sample], device: torch.device, losses_per_sample: int = 1
) -> np.ndarray:
    """Return the log-likelihood of each sample, (n,) float64. All ranks pass the same samples; each computes a share.

    losses_per_sample: as in `Runtime.score`.
    """
    index, width = runtime.data_coordinate
    share = -(-len(samples) // width)
    batches = []
    for number in range(index * share, (index + 1) * share):
        sample = samples[min(number, len(samples) - 1)]
        batch = stack_samples([sample], [number], KeptMemory(device))
        batch.counted = None if number < len(samples) else 0  # padding of the share
        batches.append(expand(batch, 0, device))
    return runtime.score(batches, losses_per_sample).numpy()[: len(samples)]
