"""Compile gangline's Triton kernels for GPUs, as launched at production sizes; print their use of registers as JSON.

    python cubins.py 80 90 100

Compute capabilities: 80 A100, 90 H100, 100 B200. The arguments are on the meta device, and no kernel is launched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from gangline_basics.model import loss_triton
from gangline_moe import gated_triton
from gangline_moe.dispatch import permute_triton
from gangline_parallel_megatron_style.precision import quantise_triton
from gangline_parallel_megatron_style.precision.formats import Format, Grain

TOKENS, WIDTH, VOCABULARY, CHOSEN = 8192, 2048, 128256, 8
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
FLOAT8 = 89  # lowest compute capability that converts to float8


def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def call_loss() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits, of_rows = make(TOKENS, VOCABULARY, dtype=dtype), make(TOKENS, dtype=torch.float32)
        lse, targets = loss_triton.log_sum_exp(logits), make(TOKENS, dtype=torch.int64)
        here = make(TOKENS, dtype=torch.bool)
        loss_triton.compute_logits_gradient(logits, targets, None, of_rows, lse, None)
        loss_triton.compute_logits_gradient(logits, targets, here, of_rows, lse, of_rows)


def call_permute() -> None:
    rows, place = make(TOKENS * CHOSEN, WIDTH), make(TOKENS, CHOSEN, dtype=torch.int64)
    weight = make(TOKENS, CHOSEN, dtype=torch.float32)
    permute_triton.gather_rows(rows, place, None)
    permute_triton.gather_rows(rows, place, weight)
    permute_triton.gather_gradients(make(TOKENS, WIDTH), rows, place, weight)


def call_gated() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        gate, up, dh = (make(TOKENS * CHOSEN, WIDTH, dtype=dtype) for _ in range(3))
        gated_triton.join(gate, up)
        gated_triton.compute_gradients(gate, up, dh)


def call_quantise() -> None:
    for grain in Grain:
        for form in Format:
            quantise_triton.quantise(make(TOKENS, WIDTH), form, grain)
            quantise_triton.quantise(make(WIDTH, TOKENS).t(), form, grain)


class Launch(NamedTuple):
    """A launch, specialised as Triton does: integers of 1 are constants, and it knows which are divisible by 16."""

    kernel: JITFunction
    types: dict[str, str]
    constants: dict[str, Any]
    divisible: list[int]  # numbers of arguments
    warps: int


def record_launches(work: Callable[[], None]) -> dict[str, Launch]:
    """Return the launches of `work` by their text."""
    found: dict[str, Launch] = {}

    def record(self: JITFunction, *args: Any, num_warps: int, **options: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=True))
        fixed = {p.name for p in self.params if p.is_constexpr}
        constants = {name: x for name, x in named.items() if name in fixed or (type(x) is int and x == 1)}
        types = {name: "constexpr" if name in constants else mangle_type(x) for name, x in named.items()}
        arguments = ", ".join(f"{name}={constants.get(name, types[name])}" for name in named)
        divisible = [n for n, x in enumerate(args) if isinstance(x, torch.Tensor) or (type(x) is int and x % 16 == 0)]
        divisible = [n for n in divisible if self.arg_names[n] not in constants]
        found[f"{self.__name__}({arguments})"] = Launch(self, types, constants, divisible, num_warps)

    run, JITFunction.run = JITFunction.run, record
    try:
        work()
    finally:
        JITFunction.run = run
    return found


def compile_launch(launch: Launch, arch: int) -> list[int]:
    """Return [registers of a thread, bytes of its stack] of the kernel on a GPU of this compute capability."""
    kernel, types, constants, divisible, warps = launch
    aligned = {(number,): [["tt.divisibility", 16]] for number in divisible}
    source = ASTSource(kernel, types, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert used, said
    return [int(used[1]), int(used[2])]


def main() -> None:
    found: dict[str, dict[str, Any]] = {}
    for work in (call_loss, call_permute, call_gated, call_quantise):
        for text, launch in record_launches(work).items():
            for arch in map(int, sys.argv[1:]):
                if work is not call_quantise or arch >= FLOAT8:
                    found.setdefault(text, {})[str(arch)] = compile_launch(launch, arch)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
