"""Tensor, sequence, pipeline, context and sharded data parallelism for gangline: hooks only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Part, hookimpl
from gangline_parallel_megatron_style.config import Fsdp, Hsdp, Pp, ThreeD, Tp
from gangline_parallel_megatron_style.precision.config import PARTS as PRECISIONS

_BUILD = "gangline_parallel_megatron_style.build:build"
_LAW = "parallel.compress other than none: gradients are rounded on the wire, and what was lost is added a step later"


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
