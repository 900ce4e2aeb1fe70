"""How weights follow gradients: what an optimizer imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.optimizer.base import Optimizer as Optimizer
    from gangline.optimizer.config import (
        Adamw as Adamw,
        Adamw8bit as Adamw8bit,
        Lion as Lion,
        Muon as Muon,
        Soap as Soap,
    )
    from gangline.parallel.owners import MatrixId as MatrixId
    from gangline.runtime import Runtime as Runtime
    from gangline.shard import Registry as Registry, Shard as Shard, model_array as model_array

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.optimizer.base": "Optimizer",
        "gangline.optimizer.config": "Adamw Adamw8bit Lion Muon Soap",
        "gangline.parallel.owners": "MatrixId",
        "gangline.runtime": "Runtime",
        "gangline.shard": "Registry Shard model_array",
    },
)
