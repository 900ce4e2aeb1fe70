"""The fake device behaves as a GPU where gangline relies on it, and a watch finds what a GPU would punish."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from layouts import CPU, CUDA
from torch import Tensor

from gangline.comm.base import Comm
from gangline.mesh import Mesh
from gangline_parallel_megatron_style.context import blocks
from gangline_parallel_megatron_style.explain.fake_comms import FakeComms
from gangline_testkit.fake_cuda.comms import CheckedComm
from gangline_testkit.fake_cuda.watch import Watch


def test_an_operator_refuses_tensors_of_both_devices() -> None:
    x = torch.ones(3, device=CUDA)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.mm(x[None], torch.ones(3, 1))
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a number may come from the host


def test_fresh_memory_holds_nan() -> None:
    assert torch.empty(4, device=CUDA).isnan().all()
    assert torch.empty(4, device=CUDA, dtype=torch.bfloat16).isnan().all()


def test_views_share_memory_and_storages_can_be_resized() -> None:
    x = torch.zeros(4, 6, device=CUDA)
    x[1:3].t().add_(1)
    assert x.cpu().sum() == 12
    assert x.view(-1)[6:9].is_contiguous()
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(4 * 6 * 4)
    x.fill_(2.0)
    assert x.sum().item() == 48


def test_gradients_are_computed_in_the_thread_of_the_device() -> None:
    threads = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, dx: Tensor) -> Tensor:
            threads.append(threading.get_ident())
            return dx

    for device in (CPU, CUDA):
        Note.apply(torch.ones(2, device=device, requires_grad=True)).sum().backward()
    assert threads[0] == threading.get_ident() != threads[1]


def test_pinned_memory_is_known() -> None:
    assert torch.empty(8, pin_memory=True)[2:].is_pinned()
    assert torch.zeros(8).pin_memory().is_pinned()
    assert not torch.zeros(8).is_pinned()


def test_operators_without_a_deterministic_kernel_are_refused() -> None:
    x = torch.ones(4, device=CUDA)
    torch.use_deterministic_algorithms(True)
    try:
        with Watch(), pytest.raises(RuntimeError, match="deterministic"):
            x.cumsum(0)
        with Watch():
            assert x.long().cumsum(0)[-1].item() == 4  # only of floating-point numbers
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("causal", "heads"), [(True, 4), (False, 2)])
def test_attention_and_its_gradients_are_those_of_the_cpu(causal: bool, heads: int) -> None:
    found = []
    for device in (CPU, CUDA):
        torch.manual_seed(0)
        sizes = ((2, 4, 10, 16), (2, heads, 10, 16), (2, heads, 10, 16))
        q, k, v = (torch.randn(size).to(device, torch.bfloat16).requires_grad_() for size in sizes)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        (out.float() * torch.arange(16, device=device)).sum().backward()
        found.append([x.float().cpu() for x in (out, q.grad, k.grad, v.grad)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=0.03, atol=0.03 * theirs.abs().max().item())


def test_flash_attention_refuses_a_log_sum_exp_with_strides() -> None:
    q = torch.randn(1, 2, 8, 16, device=CUDA, dtype=torch.bfloat16)
    out, lse = blocks.CUDA.forward(q, q, q, True, None, None)
    blocks.CUDA.backward(out, q, q, q, out, lse, True, None, None)
    wide = torch.stack((lse, lse), -1)[..., 0]
    state = torch.empty(0, dtype=torch.int64, device=CUDA)
    with pytest.raises(RuntimeError, match="strides"):
        blocks._cuda_backward(out, q, q, q, out, wide, state, state, 8, 8, 0.0, True, state, state)


def wait_for_item(x: Tensor) -> None:
    x.sum().item()


def wait_for_copy(x: Tensor) -> None:
    x.cpu()


def wait_for_host_tensor(x: Tensor) -> None:
    x + torch.arange(4.0).to(x.device)


def wait_for_pageable_tensor(x: Tensor) -> None:
    x + torch.arange(4.0).to(x.device, non_blocking=True)


def wait_for_mask(x: Tensor) -> None:
    x[x > 0]


def wait_for_size(x: Tensor) -> None:
    x.repeat_interleave(torch.full((4,), 2, device=x.device))


def wait_for_all(x: Tensor) -> None:
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (wait_for_item, "item"),
        (wait_for_copy, "device to host, blocking"),
        (wait_for_host_tensor, "host to device, blocking"),
        (wait_for_pageable_tensor, "host to device, not pinned"),
        (wait_for_mask, "boolean index"),
        (wait_for_size, "repeat_interleave without output_size"),
        (wait_for_all, "cuda.synchronize"),
    ],
)
def test_a_watch_counts_each_kind_of_wait(work, what: str) -> None:
    x = torch.ones(4, device=CUDA)
    with Watch() as watch:
        work(x)
    assert [place.split(" at ")[0] for place in watch.waits] == [what]


def test_a_watch_counts_no_wait_for_work_that_stays_on_the_device() -> None:
    x, pinned = torch.ones(4, device=CUDA), torch.empty(4, pin_memory=True)
    with Watch() as watch:
        y = x.index_select(0, x.argsort()) * 2
        pinned.copy_(y, non_blocking=True)
        y + pinned.to(CUDA, non_blocking=True)
    assert not watch.waits
    assert watch.kernels["aten::mul"] == 1


def make_comm(problems: list[str]) -> Comm:
    return CheckedComm(FakeComms(Mesh.of({"tp": 2}), 0, CUDA).get_comm("tp"), problems)


def test_a_checked_communicator_finds_what_nccl_reads_wrong() -> None:
    problems: list[str] = []
    comm, x = make_comm(problems), torch.ones(4, 6, device=CUDA)
    comm.all_reduce(x)
    comm.all_to_all(x, [1, 3], [2, 2])
    assert not problems
    comm.all_reduce(x.t())
    comm.all_to_all(x, [1, 2], [2, 2])
    comm.all_reduce(x.to(torch.float8_e4m3fn).view(torch.int16))
    assert [problem.split(": ")[1].split(" ")[0] for problem in problems] == ["strides", "splits", "type"]
