"""Check that results on the device equal results on a CPU or of a plain formula. See `gpu.py`."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F
from gpu_kernels import documents_kernel
from gpu_places import CPU, LeftOut, Place, Trainer, apart, compared, session, small, trained, within
from gpu_ranks import nccl_alone, trained as trained_on_rank, twice
from torch import Tensor

from gangline import draws
from gangline.model.calls import AttentionCall
from gangline.model.compose import compose_model
from gangline.model.init import make_whole_model
from gangline_basics.model.attention import get_plain_attention
from gangline_basics.model.gating import SWIGLU
from gangline_basics.optimizer.muon import orthogonalise
from gangline_moe.gated import compute_gradients, join
from gangline_moe.matmuls import PlainMatmuls
from gangline_parallel_megatron_style.context import blocks
from gangline_parallel_megatron_style.precision.fp8 import RECIPES, Fp8Precision
from gangline_testkit.inputs import make_full_batch
from gangline_testkit.pool import get_pool

FP64, FP32, BF16 = "precision=fp64", "precision=fp32", "precision=bf16"
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def layouts(place: Place) -> str:
    """Compare three steps in one process: float64 up to rounding, lower precisions up to theirs."""
    said = [
        compared(trained(place.device, precision, kind=kind), trained(CPU, precision, kind=kind), bound)
        for precision, bound in ((FP64, 1e-9), (FP32, 1e-3), (BF16, 3e-2))
        for kind in ("ragged", "documents")
    ]
    return f"float64: {said[0]}; bfloat16: {said[-1]}"


LAYOUTS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "tp": ({"tp": 2}, ("parallel=3d", "parallel.tp=2")),
    "ring": ({"cp": 2}, ("parallel=3d", "parallel.cp=2")),
    "ulysses": ({"cp": 2}, ("parallel=3d", "parallel.cp=2", "parallel.context=ulysses")),
    "pp": ({"pp": 2}, ("parallel=3d", "parallel.pp=2", "batch.micro_size=1")),
    "zero3": ({"dp_shard": 2}, ("parallel=fsdp",)),
    "muon": ({"dp_shard": 2}, ("parallel=fsdp", "optimizer=muon")),
    "experts": ({"dp_shard": 2}, ("parallel=fsdp", "moe=on", "moe.experts=4", "moe.ep=2")),
}


def layout_of(name: str) -> Callable[[Place], str]:
    """Return a check that compares two ranks on the device with one process on the CPU."""

    def check(place: Place) -> str:
        axes, words = LAYOUTS[name]
        edits = [word for word in words if word.startswith(("moe", "optimizer"))]
        alone = trained(CPU, FP64, *[word for word in edits if word != "moe.ep=2"], "batch.micro_size=1")
        words = (*words, FP64, "batch.micro_size=1")
        found = get_pool(2).run(trained_on_rank, str(place.device), words, axes, "ragged", timeout=300.0)
        return compared(found[0], alone, 1e-9 if name != "muon" or not place.cuda else 1e-2)

    return check


# --- kernels ---------------------------------------------------------------------------------------------------------


def _like(*shape: int, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(device, dtype)


def ring(place: Place) -> str:
    """Compare blocks of ring attention with a plain formula: out, log-sum-exp, gradients; all queries, or half."""
    kernel, dtype = (blocks.CUDA, torch.bfloat16) if place.cuda else (blocks.CPU, torch.float32)
    T = place.sized(1024, 32)
    found: dict[str, float] = {}
    q, dout = (_like(2, 8, T, 64, dtype=dtype, seed=i, device=place.device) for i in (1, 2))
    k, v = (_like(2, 2, T, 64, dtype=dtype, seed=i, device=place.device) for i in (3, 4))
    if not place.cuda:
        k, v = (x.repeat_interleave(4, dim=1) for x in (k, v))
    exact = [x.double() for x in (q, k, v)]
    for name, first, causal in (("whole", 0, True), ("half", T // 2, False)):
        rows = (slice(None), slice(None), slice(first, None))
        out, lse = kernel.forward(q[rows], k, v, causal, None, None)
        true_out, true_lse = blocks.MATH.forward(exact[0][rows], exact[1], exact[2], causal, None, None)
        found |= {f"out, {name}": apart(out, true_out), f"lse, {name}": apart(lse, true_lse)}
        # As in ring attention: the backward gets slices of the `out` and `lse` of all rows.
        all_out, all_lse = torch.zeros_like(q), lse.new_zeros(q.shape[:3])
        all_out[rows], all_lse[rows] = out, lse
        back = kernel.backward(dout[rows], q[rows], k, v, all_out[rows], all_lse[rows], causal, None, None)
        true = blocks.MATH.backward(
            dout[rows].double(), exact[0][rows], *exact[1:], true_out, true_lse, causal, None, None
        )
        found |= {f"d{n}, {name}": apart(a, b) for n, a, b in zip("qkv", back, true, strict=True)}
    return within(found, ROUNDING[dtype])


CALLS = {
    "plain": AttentionCall(),
    "window": AttentionCall(window=20),
    "soft cap": AttentionCall(soft_cap=2.0),
    "sinks": AttentionCall(window=20, sinks="sinks.weight"),
}


def attention(place: Place) -> str:
    """Check core's attention and its gradients for each kind of call, with and without documents; on a GPU Flex."""
    dtype, T = torch.bfloat16 if place.cuda else torch.float32, place.sized(512, 48)
    found: dict[str, float] = {}
    position = torch.arange(T).expand(2, T)
    document = (position >= T // 3).long()
    for name, call in CALLS.items():
        for documents in (False, True):
            given = [_like(2, n, T, 32, dtype=dtype, seed=n, device=CPU) for n in (4, 2, 2)]
            sinks = [_like(4, dtype=dtype, seed=5, device=CPU)] if call.sinks else []
            ours = _with_gradients(call, given + sinks, document if documents else None, position, place.device, dtype)
            exact = _with_gradients(call, given + sinks, document if documents else None, position, CPU, torch.float64)
            kind = f"{name}{', documents' * documents}"
            found |= {f"{what} of {kind}": apart(a, b) for (what, a), (_, b) in zip(ours, exact, strict=True)}
    return within(found, ROUNDING[dtype])


def _with_gradients(
    call: AttentionCall,
    given: list[Tensor],
    document: Tensor | None,
    position: Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> list[tuple[str, Tensor]]:
    q, k, v, *sinks = (x.detach().to(device, dtype).requires_grad_() for x in given)
    there = None if document is None else document.to(device)
    out = get_plain_attention(call)(q, k, v, there, position.to(device), *sinks)
    leaves = [q, k, v, *sinks]
    gradients = torch.autograd.grad(out, leaves, _like(*out.shape, dtype=dtype, seed=9, device=device))
    return [("out", out), *zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False)]


def fp8(place: Place) -> str:
    """Compare a float8 linear layer and its gradients with the same rounding emulated on the CPU, for each scaling."""
    found: dict[str, float] = {}
    left = []
    n, inside, outside = (place.sized(size, size // 8) for size in (1024, 2048, 1536))
    for scaling, recipe in RECIPES.items():
        if place.cuda:
            from gangline_parallel_megatron_style.precision.device import find_scaling_problem

            if why := find_scaling_problem(scaling, torch.cuda.get_device_capability(place.device), torch.version.cuda):
                left.append(why[0])
                continue
        results = []
        for device in (place.device, CPU):
            x = _like(n, inside, dtype=torch.bfloat16, seed=1, device=device).requires_grad_()
            w = _like(outside, inside, dtype=torch.bfloat16, seed=2, device=device).requires_grad_()
            y = Fp8Precision(recipe).linear(x, w)
            y.backward(_like(n, outside, dtype=torch.bfloat16, seed=3, device=device))
            results.append((y, x.grad, w.grad))
        found |= {f"{name}, {scaling}": apart(a, b) for name, a, b in zip(("y", "dx", "dw"), *results, strict=True)}
    if not found:
        raise LeftOut(left[0])
    return within(found, 1e-2)


def grouped(place: Place) -> str:
    """Check the three matmuls of stacked expert weights, with one expert that has no rows."""
    dtype = torch.bfloat16 if place.cuda else torch.float32
    A, E, I, O = (place.sized(size, size // 16) for size in (2048, 64, 1024, 512))
    counts = torch.full((E,), A // E)
    counts[0], counts[1] = 0, counts[0] + counts[1]
    bounds = F.pad(counts.cumsum(0), (1, 0)).to(place.device)
    x = _like(A, I, dtype=dtype, seed=1, device=place.device)
    y = _like(A, O, dtype=dtype, seed=2, device=place.device)
    w = _like(E, O, I, dtype=dtype, seed=3, device=place.device)
    made = PlainMatmuls()
    matmuls = [(made.multiply_rows, x, w), (made.compute_grad_x, y, w), (made.compute_grad_w, y, x)]
    found = {
        call.__name__: apart(call(a, b, bounds), call(a.to(CPU).double(), b.to(CPU).double(), bounds.to(CPU)))
        for call, a, b in matmuls
    }
    return within(found, ROUNDING[dtype])


def gated(place: Place) -> str:
    """Check the experts' gated product and its gradients."""
    dtype = torch.bfloat16 if place.cuda else torch.float32
    gate, up, dh = (_like(place.sized(2048, 64), 1024, dtype=dtype, seed=n, device=place.device) for n in (1, 2, 3))
    wide = [x.to(CPU).double() for x in (gate, up, dh)]
    calls = {"product": (join(SWIGLU, gate, up), join(SWIGLU, *wide[:2]))}
    names = ("product again", "gradient of the gate", "gradient of the other factor")
    pairs = zip(compute_gradients(SWIGLU, gate, up, dh), compute_gradients(SWIGLU, *wide), strict=True)
    found = {name: apart(*pair) for name, pair in {**calls, **dict(zip(names, pairs, strict=True))}.items()}
    return within(found, ROUNDING[dtype])


def muon(place: Place) -> str:
    """Check Newton-Schulz in bfloat16: singular values near one, and a result near the CPU's."""
    shape = (place.sized(1024, 32), place.sized(512, 16))
    matrix = _like(*shape, dtype=torch.float32, seed=1, device=CPU)
    ours, theirs = orthogonalise(matrix.to(place.device)), orthogonalise(matrix.double())
    values = torch.linalg.svdvals(ours.to(CPU).double())
    assert float(values.min()) > 0.5, f"smallest singular value: {float(values.min()):.2g}"
    assert float(values.max()) < 1.5, f"largest singular value: {float(values.max()):.2g}"
    return within({"update": apart(ours, theirs)}, 0.1 if place.cuda else 1e-4)


def random(place: Place) -> str:
    """Check that random draws in a run depend only on their coordinates: the same bits on every device."""
    sample = torch.arange(1000)
    ours, theirs = (draws.draw_uniforms(7, 3, sample.to(device), "site").to(CPU) for device in (place.device, CPU))
    assert torch.equal(ours, theirs), "the random numbers differ"
    return "bitwise equal"


# --- machinery -------------------------------------------------------------------------------------------------------


def offload(place: Place) -> str:
    """Check that the losses are the same with master weights and optimizer state in host memory."""
    words = ("parallel=fsdp", FP64)
    return compared(trained(place.device, *words, "parallel.offload=true"), trained(place.device, *words), 1e-12)


def staging(place: Place) -> str:
    """Check that a non-blocking copy into a part of pinned memory has arrived after a device synchronization."""
    rows, columns = 64, place.sized(1 << 20, 1 << 10)
    x = torch.randn(rows, columns, device=place.device)
    for name, gap in (("whole", 0), ("strided", 1024)):
        into = torch.empty(rows, columns + gap, pin_memory=place.cuda)[:, :columns]
        into.copy_(x, non_blocking=True)
        place.wait()
        assert torch.equal(into, x.to(CPU)), f"{name}: the bytes differ"
    return "equal bytes, contiguous and strided"


def captured(place: Place) -> str:
    """Capture the forward and backward pass of a block as a CUDA graph, which fails if the host has to wait."""
    place.needs_cuda("a CUDA graph")
    tree, plan = compose_model(small(BF16))
    model = make_whole_model(tree, plan, seed=1, device=place.device, dtype=torch.bfloat16)
    block = model.get_submodule("blocks.0")
    batch = make_full_batch(torch.zeros(2, 32, dtype=torch.int64)).to(place.device)
    x = torch.randn(2, 32, 64, device=place.device, dtype=torch.bfloat16, requires_grad=True)

    def pass_through(x: Tensor) -> tuple[Tensor, Tensor]:
        y = block(x, batch)
        return y, torch.autograd.grad(y.float().square().sum(), x)[0]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            pass_through(x)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = pass_through(x)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    found = {name: apart(a, b) for name, a, b in zip(("y", "dx"), held, pass_through(x), strict=True)}
    return within(found, 1e-2)


def compiled(place: Place) -> str:
    """Compare blocks under torch.compile with the same blocks without it, on the same device."""
    said = []
    for name, bound, words in (
        ("float32", 1e-3, (FP32,)),
        ("experts", 3e-2, (BF16, "moe=on", "moe.experts=4")),
        ("float8", 3e-2, ("precision=fp8",)),
    ):
        found = trained(place.device, *words, "run.compile=true"), trained(place.device, *words)
        said.append(f"{name} {compared(*found, bound, f'{name}: ')}")
    return "; ".join(said)


def deterministic(place: Place) -> str:
    """Check that two runs with run.deterministic are bitwise equal, with rows longer than one block of a kernel."""
    said = []
    for name, words in DETERMINISTIC.items():
        T = place.sized(1024, 64)
        words = (BF16, "run.deterministic=true", f"batch.sequence_length={T}", *words)
        one, two = get_pool(1).run(twice, str(place.device), words, timeout=120.0)[0]
        assert one == two, f"{name}: losses {one[0]} and {two[0]}"
        said.append(name)
    return f"bitwise equal: {', '.join(said)}"


DETERMINISTIC = {
    "documents": (),
    "window": ("model.window=100",),
    "experts": ("moe=on", "moe.experts=4"),
    "muon": ("optimizer=muon",),
}


def communicator(place: Place) -> str:
    """Check every collective with every dtype over NCCL, with one rank, because each NCCL rank needs its own GPU."""
    place.needs_cuda("NCCL")
    # the process group ends with this process
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        return alone.submit(nccl_alone, str(place.device)).result(timeout=120)


def registered(place: Place) -> str:
    """Check a save when host memory cannot be page-locked: it takes the slow path, and the next kernel runs."""
    place.needs_cuda("page-locked memory")
    from gangline.mesh import Mesh
    from gangline_ckpt_zarr.format.packed import PackedFiles
    from gangline_ckpt_zarr.save.staging import Staging

    trainer = Trainer.of(small(FP32), place.device)
    shards = list(trainer.runtime.shards())
    file = PackedFiles(trainer.runtime.registry).get_rank_file(Mesh.of({}).rank({}))
    buffer = Staging()
    try:
        buffer.prepare(file)
        # makes the next registration fail
        code = torch.cuda.cudart().cudaHostRegister(buffer._bytes.data_ptr(), buffer.size, 0)
        assert int(code) == 0, f"cudaHostRegister returned {code}"
        buffer.fill(file, shards)
        assert buffer._pageable, "the buffer is page-locked, although its registration had to fail"
        float(torch.ones(3, device=place.device).sum())
    finally:
        torch.cuda.cudart().cudaHostUnregister(buffer._bytes.data_ptr())
        buffer.close()
    return "staged in pageable memory"


def checkpoint(place: Place) -> str:
    """Run two steps on the device, save with each store, and resume on the CPU."""
    from importlib.util import find_spec

    from gangline.run.directory import RunDirectory
    from gangline.train.rank import train

    said = []
    for store in ("torch", *(["zarr"] if find_spec("fastcrc") else [])):
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/out"
            run = small(FP32, f"checkpoint={store}", "run.steps=2", f"run.dir={out}")
            RunDirectory.create(run).unlock()
            ours = session(run, place.device)
            train(ours)
            theirs = session(run, CPU)
            assert theirs.step == 2, f"{store}: the run was not saved"
            for one, two in zip(ours.shards(), theirs.shards(), strict=True):
                assert torch.equal(one.local.to(CPU), two.local), f"{store}: {one.name} differs"
            theirs.checkpointer.close()
        said.append(store)
    return f"bitwise equal after a resume: {' and '.join(said)}"


CHECKS: dict[str, Callable[[Place], str]] = {
    "ring kernel": ring,
    "staging": staging,
    "layouts": layouts,
    **{f"layout {name}": layout_of(name) for name in LAYOUTS},
    "attention": attention,
    "documents": documents_kernel,
    "fp8": fp8,
    "grouped matmuls": grouped,
    "gated product of experts": gated,
    "Newton-Schulz": muon,
    "random numbers": random,
    "offload": offload,
    "captured streams": captured,
    "deterministic": deterministic,
    "checkpoint": checkpoint,
    "NCCL": communicator,
    "registered memory": registered,
    "compile": compiled,
}
