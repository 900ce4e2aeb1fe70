"""CUDA behaviour tested without a GPU: waits, host copies, device, allocator, peak FLOP/s, out of memory."""

from __future__ import annotations

import os
import time

import pytest
import torch

from gangline.errors import UserError
from gangline.record import read_records
from gangline.train import build, loop, peaks, rank
from gangline_basics.model import rope
from gangline_basics.sampling import show
from gangline_testkit.sessions import open_session


class ClosesNever:
    """Communicators whose `close` waits for failed peers, as with NCCL."""

    rank = 0

    def close(self) -> None:
        raise AssertionError("this would wait for ever")


def test_failed_rank_reports_without_waiting_for_peers(tmp_path, monkeypatch):
    s, asked = open_session(tmp_path / "out", "launch.timeout_seconds=77"), []

    def fails(*_):
        raise UserError("the corpus is empty.")

    monkeypatch.setattr(rank, "connect", lambda *_, **given: asked.append(given["timeout"]) or ClosesNever())
    monkeypatch.setattr(rank, "build", fails)
    with pytest.raises(UserError, match="the corpus is empty"):
        rank.train_rank(str(s.directory.path))
    assert asked == [77.0], "how long a transfer may take: of two backends torch would take half an hour"


def test_out_of_memory_in_final_sample_is_reported(monkeypatch, capsys):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(show, "Sampler", full)
    show.show_sample("out", 20)
    assert "generating a sample text failed: OutOfMemoryError: CUDA out of memory" in capsys.readouterr().err


def test_sync_wait_counts_toward_next_step(tmp_path, monkeypatch):
    """Wait in the sync, while a GPU would still run the optimizer; a rank's local seconds exclude this wait."""
    told, real = [], loop.agree

    def slow(world, seconds, *rest):
        told.append(seconds)
        time.sleep(0.2)
        return real(world, seconds, *rest)

    monkeypatch.setattr(loop, "agree", slow)
    rank.train(open_session(tmp_path / "out", "run.steps=3"))
    records = read_records(tmp_path / "out" / "metrics.jsonl")
    assert [record["seconds"].get("sync", 0) >= 0.2 for record in records] == [False, True, True]
    for record, own in zip(records[1:], told[1:], strict=True):
        assert record["step_seconds"] >= 0.2
        assert own == pytest.approx(record["step_seconds"] - record["seconds"]["sync"])
        assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["step_seconds"], rel=0.5)


def test_rope_frequencies_are_copied_to_device_once(monkeypatch):
    made, real = [], torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *given, **more: made.append(given) or real(*given, **more))
    rates = (1.0, 0.123)
    for step in range(3):
        rope.compute_angles(torch.full((2, 5), step), rates, torch.float32)
    assert len(made) == 1
    rope.compute_angles(torch.zeros(2, 5), rates, torch.float64)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("dtype", "precision", "rate"),
    [
        (torch.bfloat16, "highest", 989e12),
        (torch.float16, "high", 989e12),
        (torch.float32, "highest", 67e12),
        (torch.float32, "high", 494e12),
        (torch.float64, "high", 67e12),
    ],
)
def test_gpu_peak_flops_depends_on_matmul_precision(monkeypatch, dtype, precision, rate):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    try:
        torch.set_float32_matmul_precision(precision)
        assert peaks.find_peak_flops(torch.device("cuda"), dtype)[0] == rate
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("visible", "local", "index"), [(8, "5", 5), (1, "5", 0), (2, "5", 1)])
def test_rank_takes_visible_gpu_modulo_their_number(tmp_path, monkeypatch, visible, local, index):
    """Show a rank some of its node's GPUs, as schedulers do that give each task its own GPU; stubs of torch.cuda."""
    s, current = open_session(tmp_path / "out"), []
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    s.run.job.device = "cuda"
    assert build.choose_device(s.run) == torch.device("cuda", index)
    assert current == [torch.device("cuda", index)]
    s.run.job.device = "cuda:3"
    assert build.choose_device(s.run) == torch.device("cuda", 3), "the user's choice stays"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (None, None, "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64", "max_split_size_mb:64"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", None),
    ],
)
def test_allocator_is_set_first_unless_by_user(tmp_path, monkeypatch, name, value, expected):
    """End a rank where it would open its GPU, and read the variable that the allocator of GPU memory reads."""
    s, seen = open_session(tmp_path / "out"), []
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(variable, "")  # restored after the test
        monkeypatch.delenv(variable)
    if name is not None:
        monkeypatch.setenv(name, value)

    def opens(run):
        seen.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        raise UserError("no GPU here.")

    monkeypatch.setattr(rank, "choose_device", opens)
    with pytest.raises(UserError, match="no GPU here"):
        rank.train_rank(str(s.directory.path))
    assert seen == [expected]
