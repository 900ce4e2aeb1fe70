"""Components of a rank's runtime, as plain data: see `build`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from gangline.batch import Batch
from gangline.comm.base import Comms
from gangline.mesh import Mesh
from gangline.model.contracts import StepListener
from gangline.precision import Precision
from gangline_parallel_megatron_style.data_parallel.storage import Storage
from gangline_parallel_megatron_style.pipeline.executor import Executor
from gangline_parallel_megatron_style.pipeline.rank_stages import RankStages
from gangline_parallel_megatron_style.pipeline.stage import Segment
from gangline_parallel_megatron_style.tensor.setting import Setting


@dataclass(frozen=True)
class Components:
    """Everything that is decided before the first step.

    stages         the segments of each stage of this rank, in the order of the pipeline
    own_part       a microbatch -> this rank's part of its sequences (context parallelism)
    own_tokens     (B, T) of such a part -> (B, t): the tokens whose hidden state is here (sequence parallelism)
    over_sequence  differentiable sum over the ranks that hold the rest of these sequences; None for one rank
    for_all_heads  gather of a tensor that heads share, with the gradients of all heads; None if heads are not sharded
    tokens_cut     T of such a part over t
    width          D of the hidden state; None without a pipeline
    prefetch       number of modules whose weights are unsharded ahead
    listeners      (block's path, module) of modules with `after_step`
    shapes         shapes of all trained parameters of the run, in the order of one process
    executor       the stages of a rank -> the executor of this rank's part of the schedule
    records        whether the times of each step's actions become metrics
    setting        state that the modules sharded over tp share; None for one rank
    attentions     modules whose attention sees other ranks' tokens, with the replaced functions
    cached         whether all modules support decoding with a cache
    """

    model: nn.Module
    mesh: Mesh
    comms: Comms
    precision: Precision
    storage: Storage
    stages: list[list[Segment]]
    seed: int
    deterministic: bool
    sequence_parallel: bool
    own_part: Callable[[Batch], Batch]
    own_tokens: Callable[[Tensor], Tensor]
    over_sequence: Callable[[Tensor], Tensor] | None
    for_all_heads: Callable[[Tensor], Tensor] | None
    tokens_cut: int
    width: int | None
    prefetch: int
    listeners: list[tuple[str, StepListener]]
    shapes: Mapping[str, tuple[int, ...]]
    records: bool
    setting: Setting | None
    attentions: list[tuple[nn.Module, Callable[..., Tensor]]]
    cached: bool
    executor: Callable[[RankStages], Executor]
