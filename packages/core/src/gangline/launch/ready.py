"""Loads the module of every part that core itself offers, so that no rank has to. For the fork server alone."""

from __future__ import annotations

from importlib import import_module

from gangline.plugin import builtin

_HOOKS = (
    builtin.gangline_parallel_strategies,
    builtin.gangline_precisions,
    builtin.gangline_checkpointers,
    builtin.gangline_data_sources,
    builtin.gangline_parts,
)

for _part in (part for hook in _HOOKS for part in hook()):
    import_module(_part.build.partition(":")[0])
