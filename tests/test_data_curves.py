"""Loss curves of `data=tokens` and `data=mix` on several layouts and after a kill, by the real command."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from curves import LONGEST, SETTINGS, TIMEOUT, same

from gangline_dataloader import commands
from gangline_testkit import RealRuns

STEPS = 4
WEIGHTS = "data.weights={prose: 0.999, code: 0.001}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[RealRuns]:
    """Write two token stores, `prose` and `code`, packed for sequences of 16; yield runs in their directory."""
    folder: Path = tmp_path_factory.mktemp("data")
    for name, line in (("prose", "It was the best of times, page {}. "), ("code", "def f{0}(x): return x + {0}\n")):
        (folder / f"{name}-text").mkdir()
        for number in range(60):
            text = "".join(line.format(number * n) for n in range(3 + number % 20))
            (folder / f"{name}-text" / f"{number}.txt").write_text(text)
        words = ["prepare", str(folder / f"{name}-text"), "--out", str(folder / name), "--workers", "1"]
        assert commands.main([*words, "--pack", "16"]) == 0
    with RealRuns(folder, seconds=TIMEOUT) as found:
        found.settings = (*SETTINGS, f"run.steps={STEPS}", "data.document_masking=true")
        found.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        yield found


def test_packed_mixture_on_eight_processes_matches_one(runs):
    asked = ("data=mix", "data.sources={prose: prose, code: code}", WEIGHTS, "data.packing=best_fit")
    runs.train("run.dir=alone", "parallel=single", *asked)
    runs.train("run.dir=three-d", "parallel=3d", *asked)
    same(runs.read_records("three-d"), runs.read_records("alone"))


@pytest.mark.parametrize(("data", "widths"), [("tokens", (4, 1)), ("dali", (2,))], ids=["tokens", "dali"])
def test_killed_run_resumes_at_another_width(runs, data, widths):
    """Kill all processes of a run with prefetched batches by SIGKILL; then resume it once at each width."""
    if data == "dali" and importlib.util.find_spec("nvidia") is None:
        pytest.fail("the extra [dali] is not installed: the suites of data=dali always run")
    if not (runs.directory / "whole").exists():
        runs.train("run.dir=whole", "data=tokens", "data.path=prose", f"run.steps={LONGEST}")
    process = runs.fork(f"run.dir={data}", f"data={data}", "data.path=prose", "checkpoint.every=2", "run.steps=1000")
    runs.wait_for_step(process, data, 3)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reached = runs.read_records(data)[-1]["step"]
    for more, width in enumerate(widths, 1):
        runs.train(f"resume={data}", f"run.steps={reached + more}", "parallel=ddp", f"launch.processes={width}")
    found = runs.read_records(data)
    assert len(found) == reached + len(widths)
    same(found, runs.read_records("whole")[: len(found)])


def test_resume_refuses_a_store_with_replaced_shard(runs):
    """Replace a shard by one of equal size and mtime. The manifest, which identifies the store, is unchanged."""
    shutil.copytree(runs.directory / "prose", runs.directory / "moved")
    runs.train("run.dir=exchanged", "data=tokens", "data.path=moved", "run.steps=2")
    shard = runs.directory / "moved" / "shard-00000.npy"
    before, tokens = shard.stat(), np.load(shard)
    np.save(runs.directory / "other.npy", np.full_like(tokens, ord("Z")))
    os.utime(runs.directory / "other.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    (runs.directory / "other.npy").replace(shard)
    assert "shard-00000.npy is damaged or was replaced" in runs.expect_refusal("resume=exchanged", "run.steps=4")
    assert len(runs.read_records("exchanged")) == 2
