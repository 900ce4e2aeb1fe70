"""Option `attention_backend` of models: which fused kernels compute attention on CUDA. Torch-free until used.

torch tries the backends of scaled dot-product attention in an order, and takes the first that supports a call. By
default cuDNN is first on compute capability 9 and 10 if torch has cuDNN 9.15.1 or newer: older versions had errors with
sequence lengths that 128 does not divide. Otherwise FlashAttention 2 is first.

FlashAttention 3 and 4 are separate packages. They replace the kernels of FlashAttention 2, so ring attention and
attention within documents use them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from gangline.errors import Problem, UserError

AttentionBackend = Literal["auto", "cudnn", "flash", "efficient", "math", "fa3", "fa4"]

FUSED = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")

# backend -> names of torch.nn.attention.SDPBackend, in order; math is last, because it supports every call
ORDERS: Mapping[AttentionBackend, tuple[str, ...]] = {
    "cudnn": ("CUDNN_ATTENTION", *FUSED),
    "flash": FUSED,
    "efficient": ("EFFICIENT_ATTENTION", "MATH"),
    "math": ("MATH",),
    "fa3": FUSED,
    "fa4": FUSED,
}


class Package(NamedTuple):
    """Package of kernels: its name, a module inside it ("": none), torch's name of the kernels, the installation."""

    name: str
    inner: str
    kernels: str
    install: str


PACKAGES: Mapping[AttentionBackend, Package] = {
    "fa3": Package("flash_attn_interface", "", "FA3", "Build it from the folder hopper of FlashAttention"),
    "fa4": Package("flash_attn", "cute", "FA4", "Run pip install flash-attn-4"),
}


def find_missing(backend: AttentionBackend) -> list[Problem]:
    """Return a problem if the package of this backend is missing. Imports no package."""
    package = PACKAGES.get(backend)
    if package is None or _has(package):
        return []
    module = ".".join(filter(None, (package.name, package.inner)))
    others = ", ".join(name for name in get_args(AttentionBackend) if name not in PACKAGES)
    return [
        Problem(
            f"model.attention_backend={backend}: the package {module} is not installed",
            f"torch takes the kernels of {package.kernels} from it.",
            f"{package.install}, or choose model.attention_backend among {others}.",
        )
    ]


def _has(package: Package) -> bool:
    spec = find_spec(package.name)
    if spec is None or not package.inner:
        return spec is not None
    return any(Path(folder, package.inner).is_dir() for folder in spec.submodule_search_locations or ())


_current: AttentionBackend = "auto"
_order = ExitStack()  # stays open: backward passes and compiled graphs must find the backend of the forward pass


def use_backend(backend: AttentionBackend) -> None:
    """Make this process compute attention on CUDA with these kernels; `auto` leaves the kernels as they are.

    Raises UserError if this torch does not know the kernels, or if their package is missing or does not match.
    """
    global _current
    if backend in ("auto", _current):
        return
    import torch
    from torch.nn import attention

    if package := PACKAGES.get(backend):
        if torch.cuda.is_available():
            _load_kernels(backend, package)
    elif _current in PACKAGES and torch.cuda.is_available():
        attention.restore_flash_attention_impl()
    _order.close()
    names = [getattr(attention.SDPBackend, name) for name in ORDERS[backend]]
    _order.enter_context(attention.sdpa_kernel(names, set_priority=True))
    _current = backend


def _load_kernels(backend: AttentionBackend, package: Package) -> None:
    """Replace the kernels of FlashAttention 2. Raises UserError as `use_backend`."""
    import torch
    from torch.nn import attention

    kernels: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    if package.kernels not in kernels:
        raise UserError(
            f"model.attention_backend={backend}: torch {torch.__version__} does not support {package.kernels}.",
            f"It supports: {', '.join(kernels) or 'none'}.",
            "Use a newer torch, or model.attention_backend=auto.",
        )
    try:
        attention.activate_flash_attention_impl(package.kernels)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"model.attention_backend={backend}: torch cannot load {package.kernels}: {error}",
            "The package is missing, or built for another version of torch or CUDA.",
            f"{package.install}, or use model.attention_backend=auto.",
        ) from error
