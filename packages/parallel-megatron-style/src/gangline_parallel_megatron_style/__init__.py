"""Tensor, sequence, pipeline, context and sharded data parallelism for gangline: plugin hooks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Part, hookimpl
from gangline_parallel_megatron_style.config import Fsdp, Hsdp, Pp, ThreeD, Tp
from gangline_parallel_megatron_style.precision.config import PARTS as PRECISIONS

_BUILD = "gangline_parallel_megatron_style.build:build"

_WORDS = {
    "tp": {
        "tp tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size": (
            "parallel=tp launch.processes={n}, or with other axes  parallel=3d parallel.tp={n}"
        )
    },
    "pp": {
        "pp pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size": (
            "parallel=pp launch.processes={n}, or with other axes  parallel=3d parallel.pp={n}"
        )
    },
    "3d": {
        "cp context_parallel context_parallel_size context_parallel_degree": (
            "parallel=3d parallel.cp={n} launch.processes={n}"
        )
    },
    "fsdp": {
        "fsdp fully_sharded_data_parallel": "parallel=fsdp launch.processes={n}",
        "zero zero_stage": (
            "parallel=fsdp parallel.zero={n}  (1 shards optimizer state, 2 gradients too, 3 weights too)"
        ),
    },
}


@hookimpl
def gangline_parallel_strategies() -> Iterable[Part]:
    strategies = (
        ("3d", ThreeD, "Tensor, pipeline, context and sharded data parallelism together"),
        ("fsdp", Fsdp, "Weights, gradients and optimizer state sharded over all ranks"),
        (
            "hsdp",
            Hsdp,
            "Weights, gradients and optimizer state sharded inside a group of ranks, replicated over groups",
        ),
        ("tp", Tp, "Tensor parallelism only"),
        ("pp", Pp, "Pipeline parallelism only"),
    )
    return [
        Part(name=name, config=config, build=_BUILD, summary=text, words=_WORDS.get(name, {}))
        for name, config, text in strategies
    ]


@hookimpl
def gangline_commands() -> Iterable[Command]:
    main = "gangline_parallel_megatron_style.commands:main"
    return [Command(name="parallel", run=main, summary="Report the cost of a layout, or draw a pipeline schedule")]


@hookimpl
def gangline_precisions() -> Iterable[Part]:
    return PRECISIONS
