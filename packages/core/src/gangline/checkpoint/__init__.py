"""What a checkpointer imports: its contract, the arrays that it keeps, and which checkpoints may go.

Torch is loaded with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.checkpoint.base import (
        Checkpointer as Checkpointer,
        Handle as Handle,
        SaveFailed as SaveFailed,
        SaveRequest as SaveRequest,
    )
    from gangline.checkpoint.base_weights import with_base as with_base
    from gangline.checkpoint.config import TorchCheckpoint as TorchCheckpoint
    from gangline.checkpoint.document import Document as Document
    from gangline.checkpoint.id import CheckpointId as CheckpointId
    from gangline.checkpoint.retention import Lacks as Lacks, superfluous as superfluous
    from gangline.checkpoint.torch_dcp import DcpCheckpointer as DcpCheckpointer
    from gangline.mesh import Mesh as Mesh
    from gangline.run.generation import hold as hold
    from gangline.shard import (
        Box as Box,
        Division as Division,
        Layout as Layout,
        Places as Places,
        Registry as Registry,
        Shard as Shard,
        in_model as in_model,
        model_array as model_array,
        parameter_of as parameter_of,
        primary_replica as primary_replica,
    )
    from gangline.train.restore import fingerprint as fingerprint

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.checkpoint.base": "Checkpointer Handle SaveFailed SaveRequest",
        "gangline.checkpoint.base_weights": "with_base",
        "gangline.checkpoint.id": "CheckpointId",
        "gangline.checkpoint.config": "TorchCheckpoint",
        "gangline.checkpoint.retention": "Lacks superfluous",
        "gangline.checkpoint.torch_dcp": "DcpCheckpointer",
        "gangline.run.generation": "hold",
        "gangline.mesh": "Mesh",
        "gangline.shard": (
            "Box Division Layout Places Registry Shard in_model model_array parameter_of primary_replica"
        ),
        "gangline.checkpoint.document": "Document",
        "gangline.train.restore": "fingerprint",
    },
)
