"""What a plugin offers: a `Part`, and the base that each group's configuration derives from.

Torch-free. A part says what exists; the user's configuration says what is chosen and with which
values; `build` names the code, imported only when the part is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gangline.errors import Problem
from gangline.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    import torch

    from gangline.config.schema import Run
    from gangline.interop.adapters import Adapter
    from gangline.mesh import Mesh
    from gangline.plan import Plan
    from gangline.shard import Shard

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_BUILD = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One choice in one group, as `conda`'s and `hatch`'s provider hooks yield them.

    Each part has a config class of its own (subclass one to offer other defaults), so that a
    config object alone tells which part it configures.
    """

    name: str  # what the user types after "="
    config: type  # a dataclass; its defaults are the option's defaults
    build: str  # "package.module:name", imported only when chosen
    summary: str  # one line in `gangline plugins`
    group: str | None = None  # only for gangline_parts; the other hooks know their group
    opens: Mapping[str, str] = field(default_factory=dict)  # nested groups: field of the config -> default choice
    reads: tuple[str, ...] = ()  # groups of the plugin's own, without a "/", that this part builds from `run.extra`
    law: str = ""  # what this part does that the law of layouts does not cover; shown in `gangline plugins`

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"part name {self.name!r} must be lower-case letters, digits, '_', '-' or '.'")
        if not is_dataclass(self.config):
            raise TypeError(f"part {self.name!r}: config must be a dataclass, got {self.config!r}")
        if not _BUILD.fullmatch(self.build):
            raise ValueError(f"part {self.name!r}: build must read 'package.module:name', got {self.build!r}")
        if not self.summary or "\n" in self.summary:
            raise ValueError(f"part {self.name!r}: summary must be one line")


@dataclass
class PartConfig:
    """The base of every part's configuration.

    `file_options` names the options that hold paths of files: a relative one is meant from where the run was started,
    and is written down in full, so that the run goes on from anywhere. What has a scheme (s3://...) stays as it is.
    `layout_options` names those that say how a run is carried, not which run it is: they may change when it goes on.
    """

    file_options: ClassVar[tuple[str, ...]] = ()
    layout_options: ClassVar[tuple[str, ...]] = ()

    def check(self, run: Run) -> list[Problem]:
        """All that can be refused before torch is imported."""
        return []

    def notices(self, run: Run) -> list[str]:
        """What works and is still not what one would choose; said once when the run starts."""
        return []


@dataclass
class ModelConfig(PartConfig):
    """`build(config, run) -> (tree, plan)`: the tree of config nodes and its `gangline.plan.Plan`. Torch-free."""

    vocab_size: PositiveInt = 256  # different tokens that the data may have


@dataclass
class EditConfig(PartConfig):
    """A model edit: `build` names `edit(tree, plan, options) -> (tree, plan, claimed_paths)`. Pure and torch-free.

    A group whose parts derive from this is a group of edits: it has the choice `off` without
    anyone supplying it, and its edit runs in order of group name. Two edits that claim the same path,
    or a path inside another's, are an error.

    `wraps`: it replaces nothing but puts `gangline.model.tree.WrapNode`s around nodes (adapters around linears). It
    runs after all edits that do not, may claim what others claim, and where several wrap one node the first is
    innermost.

    What an edit may say beside that it overrides below.
    """

    wraps: ClassVar[bool] = False

    def resolved(self, run: Run) -> EditConfig:
        """These options with what the user left open derived from the run; `edit` is given them."""
        return self

    def summary(self, metrics: Mapping[str, float | list[float]]) -> dict[str, float | list[float]]:
        """More numbers for a step's record, made of what modules emitted; a pure function, called on every rank."""
        return {}

    def first_weights(self, run: Run, shards: Sequence[Shard], plan: Plan) -> None:
        """Called once on every rank, after the first weights were drawn and only where no checkpoint fills the model.

        shards: this rank's `model/...` arrays, to be written in place where an edit knows better than to draw them.
        """

    def to_hugging_face(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """The config.json of the edited model, given that of the model without the edit; None: others have no such."""
        return None

    def merged(self, name: str, weight: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The parameter `name`, whole, with what this edit wraps around it added; `weight` itself where nothing is.

        stored: all parameters of the checkpoint by name, read when asked for. None: it cannot be merged. Of several
        edits that wrap one node the innermost is asked first.
        """
        return None

    def apart(self, shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> Adapter | None:
        """What `gangline export --apart` writes of the parameters of these names and shapes; None: nothing of it.

        `plan.names` tells what others call the parameters that are wrapped.
        """
        return None

    @classmethod
    def of_hugging_face(cls, config: dict[str, Any]) -> tuple[EditConfig, dict[str, Any]] | None:
        """The way back: the options that make such a model, and the config.json without them; None: not this edit's.

        Raises UserError for what the edit cannot compute. A class that offers other defaults only inherits it.
        """
        return None


@dataclass
class ParallelConfig(PartConfig):
    """`build(config, run, model, plan, mesh, comm, precision, finish) -> gangline.runtime.Runtime`."""

    def world(self, gpus: int) -> int:
        """How many processes to start where the user named no number."""
        return max(1, gpus)

    def axes(self, world: int) -> dict[str, int]:
        """Axis sizes, slowest tier first, with product `world`; raises UserError where there is no such layout."""
        return {"dp_replicate": world}

    def accumulation(self, share: int, mesh: Mesh) -> int:
        """How many microbatches a rank's `share` of a batch makes where the user gave no size: a divisor of it."""
        return 1


@dataclass
class PrecisionConfig(PartConfig):
    """`build(config, run) -> gangline.precision.Precision`."""


@dataclass
class OptimizerConfig(PartConfig):
    """`build(config, run, runtime) -> gangline.optimizer.Optimizer`."""

    learning_rate: NonNegativeFloat = 3e-3  # at its highest; the schedule multiplies it with a factor up to 1
    clip_norm: PositiveFloat | None = 1.0  # global gradient norm; null for none


@dataclass
class ScheduleConfig(PartConfig):
    """`build(config, run) -> callable(step) -> factor` in [0, 1], pure, torch-free; multiplies the learning rate."""

    warmup_steps: NonNegativeInt | None = None  # steps to climb to the full rate; null: a twentieth of the run

    def warmup(self, run: Run) -> int:
        """`warmup_steps` with its default filled in."""
        return run.steps // 20 if self.warmup_steps is None else self.warmup_steps


@dataclass
class CheckpointConfig(PartConfig):
    """`build(config, run, store) -> gangline.checkpoint.Checkpointer`."""

    every: PositiveInt | Literal["auto"] | None = None  # steps, or "auto" where the part can; null: only at the end
    at_end: bool = True  # save after the last step


@dataclass
class DataConfig(PartConfig):
    """`build(config, run, split) -> gangline.data.DataSource`; split is "train" or "validation"."""

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    path: str | list[str] | None = None  # where the data lies; null: what the source brings itself


@dataclass
class CallbackConfig(PartConfig):
    """`build(config, run) -> gangline.callback.Callback`."""


@dataclass
class HealthConfig(PartConfig):
    """`build(config, run) -> gangline.health.HealthCheck`."""


@dataclass
class TrackConfig(PartConfig):
    """`build(config, run) -> gangline.track.Tracker`, on global rank 0 alone."""


@dataclass
class LaunchConfig(PartConfig):
    """`build(config, run) -> gangline.launch.Launcher`: a run directory in, processes out."""

    processes: PositiveInt | None = None  # null: all GPUs; without a GPU what the strategy asks for


# The groups that core itself reads, in the order in which they are shown.
GROUPS: dict[str, type[PartConfig]] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "checkpoint": CheckpointConfig,
    "data": DataConfig,
    "track": TrackConfig,
    "health": HealthConfig,
    "callback": CallbackConfig,
    "launch": LaunchConfig,
}
LISTS = ("track", "health", "callback")  # groups of which a run has any number

__all__ = [
    "GROUPS",
    "LISTS",
    "CallbackConfig",
    "CheckpointConfig",
    "DataConfig",
    "EditConfig",
    "HealthConfig",
    "LaunchConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Part",
    "PartConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "TrackConfig",
]
