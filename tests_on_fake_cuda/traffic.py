"""Count the kernels of a block, forward and backward, and the bytes that they move; print JSON.

    python traffic.py

Sizes are those of production, in bf16 on an H100: tensors are fake (torch.FakeTensorMode), and torch.compile writes its
code for the GPU without compiling or running it. Every product and attention is one kernel, eager and compiled.
Milliseconds are estimates: products, attention and memory take the rates of docs/how-to/gpu.md.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gangline_testkit.fake_cuda.load import load

LIBRARY = load()  # before torch
from gangline_testkit.fake_cuda import kernels, runtime  # noqa: E402

runtime.install(LIBRARY)  # before torch's compiler
kernels.install()

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from gangline.batch import Batch  # noqa: E402
from gangline.config.serial import from_dict  # noqa: E402
from gangline.model.build import construct  # noqa: E402
from gangline.model.compose import compose_model  # noqa: E402
from gangline.model.untraced import keep_out  # noqa: E402
from gangline_basics.model import kernels as kernel_choice  # noqa: E402
from gangline_testkit.runs import parse_settings  # noqa: E402

TOKENS = 8192
QWEN = ("model=decoder", "model.dim=2048", "model.heads=32", "model.kv_heads=4", "model.head_dim=128")
BLOCKS = {
    "Llama 3 8B": ("model=llama3-8b", "model.layers=1"),
    "Qwen3 30B-A3B": (*QWEN, "model.layers=1", "model.ffn_dim=6144", "model.qk_norm=true", "moe=qwen3_30b_a3b"),
}
PEAK, PRODUCTS, MEMORY = 989e12, 650e12, 2.9e12  # FLOP/s in bf16, of products that reach it, bytes/s
ATTENTION = {"_scaled_dot_product_flash_attention": 460e12, "_scaled_dot_product_flash_attention_backward": 384e12}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "alias"}
aten = torch.ops.aten


@dataclass
class Traffic:
    """Kernels, bytes that they read and write, seconds, and FLOPs of the products and of causal attention."""

    kernels: int = 0
    bytes: int = 0
    seconds: float = 0.0
    flops: float = 0.0

    def add(self, moved: int, flops: float = 0.0, rate: float = PRODUCTS) -> None:
        self.kernels += 1
        self.bytes += moved
        self.flops += flops
        self.seconds += max(moved / MEMORY, flops / rate)


def count_flops(name: str, function: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of an operator: of products and of attention, of which a causal one computes half."""
    if name == "_grouped_mm":
        a, b = args[:2]
        return 2.0 * a.numel() * b.shape[-1]
    count = flop_registry.get(function.overloadpacket)
    flops = 0.0 if count is None else float(count(*args, **kwargs, out_val=out))
    return flops / 2 if name in ATTENTION else flops


def count_bytes(values: Any) -> int:
    """Return the bytes of all tensors, each without repetition along expanded dimensions."""
    tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor)]
    sizes = ([n for n, stride in zip(x.shape, x.stride(), strict=True) if stride] for x in tensors)
    return sum(x.itemsize * torch.Size(size).numel() for x, size in zip(tensors, sizes, strict=True))


class Recorder(TorchDispatchMode):
    """Counts each operator that launches a kernel; `products` counts those of products and attention apart."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.products = Traffic(), Traffic()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if not function.is_view and name not in FREE and any(isinstance(x, Tensor) for x in tree_leaves(out)):
            moved = count_bytes((args, kwargs)) + count_bytes(out)
            flops = count_flops(name, function, args, kwargs, out)
            for traffic in (self.all, self.products) if flops else (self.all,):
                traffic.add(moved, flops, ATTENTION.get(name, PRODUCTS))
        return out

    def launch(self, kernel: JITFunction, *args: Any, **options: Any) -> None:
        """Count the launch of a Triton kernel, in place of `JITFunction.run`."""
        self.all.add(count_bytes(args))


@aten.scaled_dot_product_attention.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Take the kernel that a GPU takes, in place of the CPU's operators."""
    assert attn_mask is None
    return aten._scaled_dot_product_flash_attention.default(q, k, v, dropout_p, is_causal, False, scale=scale)[0]


@dataclass
class Generated:
    """Kernels that torch.compile generated (`own`), and other kernels that its code calls. bytes: moved by `own`."""

    own: int = 0
    called: int = 0
    bytes: int = 0


@contextmanager
def generate(mode: FakeTensorMode) -> Iterator[Generated]:
    """Let torch.compile write its code, and run the graphs by their operators."""
    from torch._functorch import config as of_autograd
    from torch._inductor import config

    found = Generated()

    def write_code(graph: Any) -> Any:
        code = graph.codegen()[0].value
        found.own += len(re.findall(r"^\s+triton_\w+\.run\(", code, re.MULTILINE))
        found.called += len(re.findall(r"^\s+(?:\w+ = )?(?:extern_kernels|torch\.ops)\.[\w.]+\(", code, re.MULTILINE))
        for node, elements in graph.count_bytes()[1]:
            found.bytes += 0 if node.is_extern() else elements
        graph.cache_key = graph.cache_path = graph.cache_linemap = None
        return SimpleNamespace(call=lambda args: list(graph.orig_gm(*args)), __file__="none.py", runner=None)

    constant_name = GraphLowering.constant_name

    def move_constant(graph: Any, name: str, device: torch.device | None) -> str:
        with mode:
            return constant_name(graph, name, device)

    GraphLowering.compile_to_module = write_code
    GraphLowering.constant_name = move_constant
    # Padding of products is decided by timing them, and the backward graph is else compiled in the backward pass.
    options = {"shape_padding": False, "compile_threads": 1, "fx_graph_cache": False}
    with config.patch(options), of_autograd.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        yield found


def install() -> None:
    """Prepare torch and Triton to write code for an H100 that is not there."""
    limits = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
    driver = SimpleNamespace(
        binary_ext="cubin",
        utils=SimpleNamespace(get_device_properties=lambda device: limits),
        get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
    )
    triton.runtime.driver.set_active(driver)
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice", "_cuda_isInBadFork"):
        setattr(torch._C, name, lambda *args: 0)
    for name in ("_exchange_device", "_maybe_exchange_device", "current_blas_handle"):
        setattr(torch.cuda, name, lambda *args: 0)
    FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[assignment]
    vars(kernel_choice)["_launches"] = lambda: True


def make_block(settings: tuple[str, ...]) -> tuple[nn.Module, Tensor, Batch]:
    """Return the first block of a model, its input and its batch, on the fake GPU."""
    run = from_dict(parse_settings(list(settings)))
    model = construct(compose_model(run)[0])
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            empty = torch.empty(weight.shape, device="cuda", dtype=torch.bfloat16)
            module.register_parameter(name, nn.Parameter(empty))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty(buffer.shape, device="cuda", dtype=buffer.dtype))
    shape, device = (1, TOKENS), "cuda"
    x = torch.empty(*shape, run.model.dim, device=device, dtype=torch.bfloat16, requires_grad=True)  # type: ignore[attr-defined]
    tokens = torch.empty(shape, dtype=torch.int64, device=device)
    batch = Batch(
        tokens=tokens,
        targets=tokens,
        loss_mask=torch.empty(shape, dtype=torch.bool, device=device),
        position=torch.empty(shape, dtype=torch.int64, device=device),
        sample=tokens[:, 0],
    )
    return model.get_submodule("blocks.0"), x, batch


def measure(settings: tuple[str, ...]) -> dict[str, Any]:
    """Return kernels, bytes, milliseconds and share of the peak of a block, eager and compiled."""
    mode, eager = FakeTensorMode(allow_non_fake_inputs=True), Recorder()
    with mode:
        block, x, batch = make_block(settings)
        run, JITFunction.run = JITFunction.run, lambda kernel, *a, **o: eager.launch(kernel, *a, **o)
        with torch._dispatch.python.enable_python_dispatcher(), eager:
            block(x, batch).sum().backward()
        JITFunction.run = run
    with generate(mode) as found, mode:
        keep_out()
        y = torch.compile(block.forward)(x, batch)
        y.sum().backward()
    products = eager.products
    compiled = Traffic(
        found.own + found.called,
        products.bytes + found.bytes,
        products.seconds + found.bytes / MEMORY,
        products.flops,
    )
    return {name: describe(traffic) for name, traffic in (("eager", eager.all), ("compiled", compiled))}


def describe(traffic: Traffic) -> dict[str, float]:
    share = traffic.flops / traffic.seconds / PEAK
    return {"kernels": traffic.kernels, "GB": traffic.bytes / 1e9, "ms": 1e3 * traffic.seconds, "of peak": share}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=folder)
        install()
        print(json.dumps({name: measure(settings) for name, settings in BLOCKS.items()}))


if __name__ == "__main__":
    main()
