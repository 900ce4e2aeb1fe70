"""Trace of the real operators of one rank of a layout on the meta device: peak memory and traffic.

The model, the strategy and the optimizer are built on the meta device with fake communicators, and steps run through
them; every allocation and release is counted. Attention and norms are the fused kernels of a GPU.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gangline.batch import Batch
from gangline.comm.base import Pending
from gangline.comm.wrap import Wrapped, WrappedComms
from gangline.mesh import DATA_AXES
from gangline.model.calls import AttentionCall
from gangline.model.compose import Composed
from gangline.model.contracts import get_seam_function
from gangline.plan import matches
from gangline.plugin import registry
from gangline.runtime import Job
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.model.attention import PlainAttention
from gangline_basics.model.norm import RMSNorm
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.data_parallel.param_buffer import ParamBuffer
from gangline_parallel_megatron_style.explain.fake_comms import FakeComms
from gangline_parallel_megatron_style.runtime import ComposedRuntime

if TYPE_CHECKING:
    from gangline.config import Run


@dataclass(frozen=True)
class Traced:
    """Result of a trace.

    resident_bytes  bytes of memory in use between steps
    peak            peak bytes of memory in a step
    operators       number of operators in a step
    seconds         time of the trace
    calls, sent     number of calls and bytes sent in a step, by (axis, operation)
    """

    resident_bytes: int
    peak: int
    operators: int
    seconds: float
    calls: Counter[tuple[str, str]]
    sent: Counter[tuple[str, str]]


@dataclass
class Held:
    """A pending reduction that keeps its input in memory until `wait`."""

    result: Tensor
    sent: Tensor | None

    def wait(self) -> Tensor:
        self.sent = None
        return self.result


class Holding(Wrapped):
    """A communicator whose reduce-scatters keep their input in memory until `wait`."""

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        return Held(super()._reduce_scatter(x, background).wait(), x)


class Allocations(TorchDispatchMode):
    """Dispatch mode that counts the bytes of memory that operators allocate and release.

    left_out: model whose parameters are not counted
    """

    def __init__(self, left_out: nn.Module) -> None:
        super().__init__()
        self.live = self.peak = self.operators = 0
        # parameters of the full model: a rank allocates only its own shards
        self._known = {parameter.untyped_storage()._cdata: 0 for parameter in left_out.parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operators += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = 0
            weakref.finalize(storage, self._forget, key)
            self.resize(storage)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Update the counts after a storage changed its size."""
        change = storage.nbytes() - self._known[storage._cdata]
        self._known[storage._cdata] += change
        self.live += change
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def trace(run: Run, case: Case, pipeline_rank: int) -> Traced:
    """Trace the second step of the first rank with index `pipeline_rank` along pp; a first step allocates the state."""
    began = time.perf_counter()
    mesh = case.mesh
    fake = FakeComms(mesh, mesh.rank({"pp": pipeline_rank}), "meta")
    comms = WrappedComms(fake, Holding)
    finish = make_finish(run.job.recompute, False, run.job.recompute_every, case.plan.seams)
    precision = registry.build(run.precision, run)

    def finish_block(block: nn.Module, path: str) -> None:
        use_gpu_kernels(block, path, case)
        finish(block, path)

    job = Job(Composed(run, case.tree, case.plan), mesh, comms, precision, finish_block)
    model = job.model
    described = list(model.parameters())  # kept alive, because `Allocations` knows a storage by its address
    with Allocations(left_out=model) as allocations:
        runtime: ComposedRuntime = registry.build(run.parallel, job)
        use_gpu_kernels(model.get_submodule(case.plan.head), case.plan.head, case)
        optimizer = registry.build(run.optimizer, run, runtime)
        callbacks = [registry.build(config, run) for config in run.callback.values()]
        for name, callback in zip(run.callback, callbacks, strict=True):
            callback.place = f"callback/{name}"
            callback.attach(runtime, optimizer, comms, None, comms.device)
        for buffer in runtime.storage.param_buffers:
            watch(buffer, allocations)
        step(runtime, case, case.microbatches)
        resident_bytes, allocations.peak = allocations.live, allocations.live
        fake.traffic.calls.clear()
        fake.traffic.bytes.clear()
        allocations.operators = 0
        step(runtime, case, case.microbatches)
    del optimizer, callbacks, described
    seconds = time.perf_counter() - began
    return Traced(
        resident_bytes, allocations.peak, allocations.operators, seconds, fake.traffic.calls, fake.traffic.bytes
    )


def step(runtime: ComposedRuntime, case: Case, microbatches: int) -> None:
    """Run the forward and backward passes and reductions of a step, without the gradient norm, which needs values."""
    rows, length = case.micro_size, case.sequence_length
    with torch.device("meta"):
        tokens = torch.empty(rows, length, dtype=torch.int64)
        batch = Batch(tokens, tokens, tokens.bool(), tokens, tokens[:, 0])
    runtime.storage.refresh()
    runtime.storage.clear()
    runtime.run_microbatches([batch] * microbatches, tokens=rows * length * microbatches * case.mesh.size(*DATA_AXES))
    runtime.storage.finish()


def use_gpu_kernels(module: nn.Module, path: str, case: Case) -> None:
    """Install the fused norm and attention of a GPU in a module, because the meta device decomposes them."""
    seams = [seam.pattern for seam in case.plan.seams if seam.name == "attention"]
    for name, inner in module.named_modules(prefix=path):
        if type(inner) is RMSNorm:
            inner.forward = _Norm(inner)  # type: ignore[method-assign]
        function = get_seam_function(inner, "attention")
        if isinstance(function, PlainAttention) and any(matches(pattern, name) for pattern in seams):
            inner.attention = _Flash(function.computes)


@dataclass
class _Norm:
    """The fused RMS norm, which saves its input and the reciprocal RMS of each row."""

    of: RMSNorm

    def __call__(self, x: Tensor) -> Tensor:
        return _FusedNorm.apply(x, self.of.scale_of(x))


class _FusedNorm(torch.autograd.Function):
    """Autograd function with the memory of `aten::_fused_rms_norm`, whose decomposition would save intermediates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@dataclass(frozen=True)
class _Flash:
    """The fused attention kernel. It saves queries, keys, values, output and log-sum-exps, with or without a window."""

    computes: AttentionCall

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, document: Tensor | None, position: Tensor) -> Tensor:
        call = self.computes
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, call.causal, scale=call.scale)[0]


def watch(buffer: ParamBuffer, counted: Allocations) -> None:
    """Make `counted` include the memory that `unshard` and `reshard` of `buffer` resize without an operator."""
    storage, unshard, reshard = buffer.full.untyped_storage(), buffer.unshard, buffer.reshard

    def record_unshard() -> None:
        unshard()
        counted.resize(storage)

    def record_reshard() -> None:
        reshard()
        counted.resize(storage)

    buffer.__dict__.update(unshard=record_unshard, reshard=record_reshard)
