"""Register operators that only a CUDA build of torch has: attention, RMS norm, products with a wider result."""

from __future__ import annotations

import torch
from torch import Tensor

from gangline_basics.model import flex
from gangline_testkit.fake_cuda import attention
from gangline_testkit.fake_cuda.memory import to_device, to_host

_library: list[torch.library.Library] = []


def install() -> None:
    """Add the operators to torch until the process ends."""
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "_fused_sdp_choice": attention.choose_attention,
        "_scaled_dot_product_flash_attention": attention.attend_flash,
        "_scaled_dot_product_flash_attention_backward": attention.attend_flash_backward,
        "_flash_attention_forward": attention.attend_segments,
        "_flash_attention_backward": attention.attend_segments_backward,
        "_scaled_dot_product_efficient_attention": attention.attend_efficient,
        "_scaled_dot_product_efficient_attention_backward": attention.attend_efficient_backward,
        "_fused_rms_norm": normalise,
        "_fused_rms_norm_backward": normalise_backward,
        "mm.dtype": multiply_wide,
        "addmm.dtype": add_product_wide,
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CUDA")
    _library.append(library)
    vars(flex)["_make_kernel"] = lambda: attention.attend_scores


# ---- RMS norm ----


def normalise(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Compute the RMS norm over the last dimension; return (output, reciprocal root mean square of each row)."""
    x, weight = to_host(x), None if weight is None else to_host(weight)
    wide = x.double() if x.dtype == torch.float64 else x.float()
    limit = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = (wide.square().mean(-1, keepdim=True) + limit).rsqrt()
    out = wide * rstd
    return to_device((out if weight is None else out * weight).to(x.dtype)), to_device(rstd)


def normalise_backward(
    dout: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the backward pass of `normalise`; return the gradients of x and of the weight."""
    dout, x, rstd = map(to_host, (dout, x, rstd))
    kind = rstd.dtype
    scaled = dout.to(kind) if weight is None else dout.to(kind) * to_host(weight).to(kind)
    normal = x.to(kind) * rstd
    dx = rstd * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    dweight = None
    if weight is not None and output_mask[1]:
        dweight = to_device((dout.to(kind) * normal).flatten(0, -2).sum(0).to(weight.dtype))
    return to_device(dx.to(x.dtype)), dweight


# ---- products ----


def multiply_wide(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return a product in a wider data type."""
    return to_device(to_host(a).to(out_dtype) @ to_host(b).to(out_dtype))


def add_product_wide(
    total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Return `total` plus a product, in a wider data type."""
    product = to_host(a).to(out_dtype) @ to_host(b).to(out_dtype)
    return to_device(beta * to_host(total).to(out_dtype) + alpha * product)
