"""What a layout holds and does, as data without torch: what strategies explain, and planners read.

explained    Explained, and what it is made of
timeline     when each action of a step runs, given what it costs
work         what a node and all in it compute on a rank
activations  what a forward pass keeps for its backward pass
replicated   strategies that hold the whole model on every rank
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.explain.activations import (
        ActivationSizes as ActivationSizes,
        beside_head as beside_head,
        copies_output as copies_output,
        norm_bytes as norm_bytes,
        of_angles as of_angles,
        of_further_loss as of_further_loss,
        of_head as of_head,
        of_node as of_node,
        recomputed_attention as recomputed_attention,
    )
    from gangline.explain.explained import (
        Explained as Explained,
        Kernels as Kernels,
        Operation as Operation,
        RankExplained as RankExplained,
        StepAction as StepAction,
        Transfer as Transfer,
        When as When,
    )
    from gangline.explain.timeline import (
        ActionTimes as ActionTimes,
        StepTimeline as StepTimeline,
        step_timeline as step_timeline,
    )
    from gangline.explain.work import StageWork as StageWork, work_of as work_of
    from gangline.model.products import (
        AttentionProduct as AttentionProduct,
        MatrixProduct as MatrixProduct,
        Product as Product,
    )

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.explain.explained": "Explained Kernels Operation RankExplained StepAction Transfer When",
        "gangline.explain.timeline": "ActionTimes StepTimeline step_timeline",
        "gangline.explain.work": "StageWork work_of",
        "gangline.explain.activations": (
            "ActivationSizes beside_head copies_output norm_bytes of_angles of_further_loss of_head of_node "
            "recomputed_attention"
        ),
        "gangline.model.products": "AttentionProduct MatrixProduct Product",
    },
)
