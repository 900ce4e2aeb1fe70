"""Synchronization of the ranks at the end of a step: signals, verdicts, save requests, data, MFU.

MFU is model FLOPs utilization.
"""

from __future__ import annotations

import numpy as np
import torch

from gangline.data.base import DataSource
from gangline.errors import UserError
from gangline.health import Action, Verdict
from gangline.mesh import Mesh
from gangline.pulse.layout import ROWS
from gangline.train.agree import WORK, Gathered, agree, check_same_data, compute_rank_mfu
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

CPU = torch.device("cpu")


def told(knowing: int) -> Gathered:
    world = rank.make_comms(Mesh.of({"dp_replicate": rank.world})).world
    mine = rank.index == knowing
    verdicts = [Verdict("spike", "step 3", 0.5, "the loss", Action.WARN)] if mine else []
    phases = [0.25 * rank.index] * len(ROWS)
    loss = None if rank.index == 1 else 2.0 + rank.index
    return agree(world, 1.0 + rank.index, "SIGTERM" if mine else None, verdicts, mine, phases, loss)


def test_sync_shares_signal_verdicts_and_save_request() -> None:
    for knowing in (0, 2):
        for agreed in get_pool(3).run(told, knowing):
            assert agreed.signal == "SIGTERM"
            assert [verdict.kind for verdict in agreed.verdicts] == ["spike"]
            assert agreed.due
            assert agreed.rank_seconds == {"min": 1.0, "median": 2.0, "max": 3.0}
            assert agreed.rank_losses == [2.0, None, 4.0]
            assert agreed.rank_phases == {phase: [0.0, 0.25, 0.5] for phase in ROWS}


def test_sync_without_events_returns_empty() -> None:
    for agreed in get_pool(3).run(told, -1):
        assert (agreed.signal, agreed.verdicts, agreed.due) == ("", [], False)


def test_rank_mfu_excludes_wait_for_other_ranks() -> None:
    """Use a step of 2 s on two ranks: rank 0 works for the complete step, and rank 1 waits for half of the step."""
    phases = {name: [0.0, 0.0] for name in ROWS} | {"forward": [0.5, 0.25], "backward": [1.5, 0.75]}
    phases |= {"collective": [0.0, 1.0], "checkpoint": [3.0, 3.0], "other": [9.0, 0.5]}
    assert set(WORK) <= set(ROWS)
    gathered = Gathered(None, phases, None, "", [], False, 0.0)
    assert compute_rank_mfu(0.4, 2.0, gathered) == [0.4, 0.8]
    assert compute_rank_mfu(0.5, 1.5, gathered) == [0.5, 0.75], (
        "the forward passes of a validation are no work of the step"
    )
    assert compute_rank_mfu(None, 2.0, gathered) is None
    assert compute_rank_mfu(0.4, 2.0, Gathered(None, None, None, "", [], False, 0.0)) is None


class Opened(DataSource):
    """Data source that reports the shards that a rank found in a growing corpus."""

    def __init__(self, shards: int) -> None:
        self.shards = shards

    def sample(self, i: int) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def count_samples(self) -> int:
        return self.shards

    def compute_fingerprint(self) -> str:
        return f"{self.shards} shards"


def opened(late: int | None) -> str:
    world = rank.make_comms(Mesh.of({"dp_replicate": rank.world})).world
    try:
        check_same_data(world, {"train": Opened(4 if rank.index == late else 3), "validation": Opened(1)})
    except UserError as error:
        return str(error)
    return ""


def test_different_data_is_reported_on_every_rank() -> None:
    assert get_pool(3).run(opened, None) == ["", "", ""]
    for message in get_pool(3).run(opened, 2):
        assert "the same train data: rank 2 opened 4 shards, rank 0 3 shards" in message
