"""Components of a rank's runtime, as plain data; `build.build` makes them."""

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
    """All parts of a rank's runtime that are decided before the first step.

    stages         the segments of each stage of this rank, in the order of the pipeline
    own_part       function: microbatch -> this rank's part of the microbatch's sequences (context parallelism)
    own_tokens     function: (B, T) of this rank's part -> (B, t), the tokens whose hidden state this rank stores
                   (sequence parallelism)
    over_sequence  differentiable sum over the ranks that share a sequence; None if each rank has full sequences
    for_all_heads  differentiable gather, over tokens, of a tensor that all heads read; its backward pass sums the
                   gradients of the heads of all ranks; None if heads are not sharded
    tokens_cut     T / t: number of ranks that split the tokens of this rank's part
    width          D of the hidden state; None without a pipeline
    prefetch       number of modules whose weights are unsharded before use
    listeners      (path of the block, module) of each module that has `after_step`
    shapes         shapes of all trained parameters of the run, in the parameter order of a one-process run
    executor       function: stages of a rank -> executor of this rank's part of the schedule
    records        whether the times of each step's pipeline actions are logged as metrics
    setting        state that the modules sharded over tp share; None if tp has one rank
    attentions     (module, original attention function) of each module whose attention reads other ranks' tokens
    cached         whether all modules support decoding with a KV cache
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
