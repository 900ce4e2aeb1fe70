"""Tensor, sequence, pipeline, context and sharded data parallelism for gangline: hooks only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Part, hookimpl
from gangline_parallel_megatron_style.config import Fsdp, Hsdp, Pp, ThreeD, Tp
from gangline_parallel_megatron_style.precision.config import PARTS as PRECISIONS

_BUILD = "gangline_parallel_megatron_style.build:build"
_LAW = (
    "parallel.compress=bf16 rounds gradients on the wire; parallel.compress=onebit sends their signs and a scale, and "
    "adds what that lost to the next ones, so losses and gradients are those of one process only on average"
)


@hookimpl
def gangline_parallel_strategies() -> Iterable[Part]:
    found = (
        ("3d", ThreeD, "Tensor, pipeline, context and sharded data parallelism together"),
        ("fsdp", Fsdp, "Weights, gradients and optimizer state sharded over all ranks"),
        ("hsdp", Hsdp, "Sharded inside a group of ranks, replicated over the groups"),
        ("tp", Tp, "Tensor parallelism alone"),
        ("pp", Pp, "Pipeline parallelism alone"),
    )
    return [Part(name=name, config=config, build=_BUILD, summary=text, law=_LAW) for name, config, text in found]


@hookimpl
def gangline_commands() -> Iterable[Command]:
    main = "gangline_parallel_megatron_style.commands:main"
    return [Command(name="parallel", run=main, summary="Explain a layout, draw a pipeline's schedule")]


@hookimpl
def gangline_precisions() -> Iterable[Part]:
    return PRECISIONS
