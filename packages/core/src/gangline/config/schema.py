"""A complete run as typed dataclasses, and the base options of each group: OptimizerConfig (learning_rate, clip_norm),
CheckpointConfig (every, at_end), LaunchConfig (processes, timeout_seconds) and so on.

Filled by Hydra or in plain Python, and read by every rank. Each group has a base class for the configurations of its
parts; `Run` has the configurations of the chosen parts. Arguments and result of each part's build function are in
`gangline.plugin.hooks.HOOKS`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gangline.config.answers import ItemSizes, LayoutBounds, Sidecar
from gangline.config.edited_weights import EditedWeights
from gangline.config.gradient_sizes import GradientSizes
from gangline.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from gangline.config.sections import BatchSection, RunSection, ValidateSection
from gangline.config.state_sizes import StateSizes
from gangline.errors import Problem

if TYPE_CHECKING:
    from gangline.comm.base import Comms
    from gangline.data.vocabulary import Codec, RendersChats
    from gangline.explain.explained import Explained
    from gangline.explain.topology import Topology
    from gangline.mesh import Mesh
    from gangline.model.tree import Node
    from gangline.plan import Plan
    from gangline.shard import Shard


@dataclass
class PartConfig:
    """The base of every part's configuration."""

    # names of options that hold paths of files: one path, a list of paths, or a mapping to paths. A relative path is
    # relative to the directory where the run was started, and is written as an absolute path into config.yaml. A URL
    # (s3://...) is not changed.
    file_options: ClassVar[tuple[str, ...]] = ()
    # names of options that set the layout and do not define the run: a resume may change them
    layout_options: ClassVar[tuple[str, ...]] = ()

    def check(self, run: Run) -> list[Problem]:
        """Return all mistakes in these options that can be found before torch is imported."""
        return []

    def list_notices(self, run: Run) -> list[str]:
        """Return warnings about valid but probably unintended options, which are printed once when the run starts."""
        return []

    def list_sidecars(self, run: Run) -> list[Sidecar]:
        """Return the sidecars, processes that run next to the ranks of each machine and start before the ranks."""
        return []

    def preload(self, run: Run) -> list[str]:
        """Return the names of modules that every rank needs; the server that forks the ranks imports them once."""
        return []

    def get_environment(self, run: Run) -> dict[str, str]:
        """Return environment variables to set on every rank before torch connects the ranks; variables of the user win.

        A run in which two parts set one variable to different values is refused, unless the user sets the variable.
        """
        return {}

    def wrap(self, run: Run, comms: Comms) -> Comms:
        """Return `comms`, or a wrapper (`gangline.comm.wrap.WrappedComms`) that measures, delays or breaks traffic.

        Called on every rank before any part is built; a later part of the run wraps the result of an earlier part.
        `gangline.comm.purpose.get_purpose` returns what a collective is for, such as gradients or losses.
        """
        return comms


@dataclass
class ModelConfig(PartConfig):
    """Options of a model, which is built as a tree of config nodes and a `gangline.plan.Plan`. Torch-free."""

    vocab_size: PositiveInt = 256  # vocabulary size: number of different tokens

    def get_weights_directory(self) -> str | None:
        """Return the directory of pretrained weights that the run starts from, or None for initialized weights."""
        return None


@dataclass
class EditConfig(PartConfig, EditedWeights):
    """Options of a model edit. The function that a part names in `build` is the edit itself, pure and torch-free.

    A group whose parts derive from this class is a group of edits. Core adds the choice `off`. Edits run in order of
    group name. Two edits that claim the same path, or a path and a path inside it, are an error.
    All methods are optional.
    """

    # whether the edit only puts `gangline.model.tree.WrapNode`s around nodes (adapters around linears). It then runs
    # after all other edits and may claim paths that they claim; of several wraps of a node, the first is innermost.
    wraps: ClassVar[bool] = False

    def resolve(self, run: Run) -> EditConfig:
        """Return these options with each unset option derived from the run; the edit function gets the result."""
        return self

    def summarise(self, metrics: Mapping[str, float | list[float]]) -> dict[str, float | list[float]]:
        """Return further numbers for a step's record, computed from emitted metrics. Pure, and called on every rank."""
        return {}

    def fill_init_weights(self, run: Run, shards: Sequence[Shard], plan: Plan) -> None:
        """Change initial weights in place.

        Called once on every rank, after the random initialization, unless a checkpoint fills the model.
        shards: this rank's shards of the `model/...` arrays.
        """

    def iterate_layouts(self, run: Run, world: int) -> Iterator[EditConfig]:
        """Yield these options, and variants that change the sharding over ranks but not the computed result."""
        yield self


@dataclass
class ParallelConfig(PartConfig):
    """Options of a parallel strategy, which is built from a `gangline.runtime.Job` that contains the run."""

    # whether `job.reduction` sums gradients; False: only reductions with `GradientsConfig.plain` are accepted
    reduces: ClassVar[bool] = False

    def count_ranks(self, gpus: int) -> int:
        """Return the number of ranks to start on `gpus` GPUs if launch.processes is null."""
        return max(1, gpus)

    def size_axes(self, world: int) -> dict[str, int]:
        """Return axis -> size, slowest network tier first, with product `world`. Raises UserError if no layout fits."""
        return {"dp_replicate": world}

    def count_microbatches(self, share: int, mesh: Mesh) -> int:
        """Return a rank's default number of microbatches per step: a divisor of `share`, its sequences per step."""
        return 1

    def explain(
        self, run: Run, mesh: Mesh, model: tuple[Node, Plan] | None = None, topology: Topology | None = None
    ) -> Explained | None:
        """Return the memory, traffic and computation of a step in this layout; None if the strategy has no estimate.

        The run must pass `check`. model: the run's model (`compose_model`), if the caller has it.
        topology: the network; None: the network in the part's own options, else 8 GPUs per node.
        """
        return None

    def compute_bounds(
        self, run: Run, mesh: Mesh, model: tuple[Node, Plan], topology: Topology | None = None
    ) -> LayoutBounds | None:
        """Return lower bounds on the cost of `run` with these options; None if their layout is impossible.

        model, topology: as in `explain`. Options whose pipeline stages do equal work must return the same `work`
        object, so that a planner estimates its time once.
        """
        return LayoutBounds()

    def iterate_layouts(self, run: Run, world: int) -> Iterator[ParallelConfig]:
        """Yield these options and others with which `world` ranks could train the run; some may not pass `check`."""
        yield self


@dataclass
class GradientsConfig(PartConfig, GradientSizes):
    """Options of a gradient reduction, which sums gradients over data-parallel ranks."""

    plain: ClassVar[bool] = False  # whether it only sums gradients, so that a strategy may use its own collectives


@dataclass
class PrecisionConfig(PartConfig):
    """Options of a precision: the number formats of a run."""

    finds_scale: ClassVar[bool] = False  # whether the precision adapts a loss scale and skips steps that overflow

    def get_sizes(self) -> ItemSizes:
        """Return the bytes per number in this precision, for estimates of memory and traffic."""
        return ItemSizes(compute=2, master=4, gradient=4, wire=4)

    def get_matmul_format(self) -> str:
        """Return the number format of matmuls in blocks, as a cluster file names it, such as "bf16"."""
        return "bf16"


@dataclass
class OptimizerConfig(PartConfig, StateSizes):
    """Options of an optimizer."""

    learning_rate: NonNegativeFloat = 3e-3  # peak learning rate; the schedule multiplies it by a factor up to 1
    clip_norm: PositiveFloat | None = 1.0  # gradient clipping: maximum global gradient norm; null: no clipping

    def count_states(self, matrix: bool) -> float:
        return 2


@dataclass
class ScheduleConfig(PartConfig):
    """Options of a learning-rate schedule."""

    warmup_steps: NonNegativeInt | None = None  # warmup steps to the peak learning rate; null: 1/20 of run.steps

    def count_warmup_steps(self, run: Run) -> int:
        """Return `warmup_steps`, or 1/20 of the run's steps if it is None."""
        return run.steps // 20 if self.warmup_steps is None else self.warmup_steps


@dataclass
class CheckpointConfig(PartConfig):
    """Options of a checkpointer, which is built with the key-value store of the job."""

    # checkpoint interval in steps; auto: set by the checkpointer, if supported; null: no periodic checkpoint
    every: PositiveInt | Literal["auto"] | None = None
    at_end: bool = True  # final checkpoint after the last step
    save_frozen: bool = True  # frozen weights in checkpoints; false: a resume initializes them or loads model.weights


@dataclass
class DataConfig(PartConfig):
    """Options of a data source, which is built for each split: "train" or "validation"."""

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    path: str | list[str] | None = None  # data path or list of data paths; null: built-in data of the data source

    def build_codec(self, run: Run) -> Codec | None:
        """Return the tokenizer without reading the data; None: only the data source knows it. Raises UserError."""
        return None

    def build_chat_template(self, run: Run) -> RendersChats | None:
        """Return the chat template of this data; None: use the tokenizer's chat template. Raises UserError."""
        return None

    def export_files(self, run: Run) -> dict[str, bytes]:
        """Return the tokenizer's files, by name, for the directory of an exported model. Raises UserError."""
        return {}


@dataclass
class CallbackConfig(PartConfig):
    """Options of a callback."""

    def count_copies(self, run: Run) -> int:
        """Return the number of arrays that the callback stores per trained parameter, to estimate memory."""
        return 0


@dataclass
class HealthConfig(PartConfig):
    """Options of a health check."""


@dataclass
class TrackConfig(PartConfig):
    """Options of a tracker. Only global rank 0 builds trackers."""


@dataclass
class LaunchConfig(PartConfig):
    """Options of a launcher, which starts the processes of a run directory."""

    shares: ClassVar[bool] = False  # whether commands on several nodes form one job with one run directory
    here: ClassVar[bool] = True  # whether ranks run on the machine of the command; else a scheduler starts them
    at_once: ClassVar[bool] = False  # whether all runs of a sweep are launched together, by `launch_all`

    processes: PositiveInt | None = None  # number of ranks; null: set by the parallel strategy, usually one per GPU
    timeout_seconds: PositiveFloat = 1800.0  # collective timeout in seconds: a collective that exceeds it ends the run
    signal_seconds: PositiveFloat | None = None  # seconds from a scheduler's signal to its SIGKILL; null: no limit

    def count_ranks(self, run: Run) -> int:
        """Return the number of ranks on all nodes: `processes` or, if it is None, the strategy's request."""
        from gangline.launch.devices import count_gpus

        return self.processes or run.parallel.count_ranks(count_gpus(run.job.device) * self.count_max_nodes())

    def count_max_nodes(self) -> int:
        """Return the maximum number of nodes that a run of this launcher has."""
        return 1

    def defers_check(self, config: PartConfig) -> bool:
        """Return whether the check of a part must wait, because its files are on other machines."""
        return False

    def find_refusals(self, run: Run) -> list[Problem]:
        """Return the problems that prevent a start of the ranks. Called for a run that passes all other checks."""
        return []

    def get_seconds_to_stop(self) -> float | None:
        """Return the grace period in seconds from a request to stop to the kill of the ranks; None: no limit."""
        return None


@dataclass
class SimulatorConfig(PartConfig):
    """Options of a simulator of failures. Commands build simulators; a run does not."""


@dataclass
class Run:
    """One run: sections of values, and one configuration for each part that was chosen.

    The class of a configuration identifies its part (`gangline.plugin.registry.Installed.find_part`).
    """

    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    gradients: GradientsConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig
    data: DataConfig
    launch: LaunchConfig
    job: RunSection = field(default_factory=RunSection)  # section `run` of a configuration
    batch: BatchSection = field(default_factory=BatchSection)
    validate: ValidateSection = field(default_factory=ValidateSection)
    track: dict[str, TrackConfig] = field(default_factory=dict)  # part name -> its configuration
    health: dict[str, HealthConfig] = field(default_factory=dict)
    callback: dict[str, CallbackConfig] = field(default_factory=dict)
    edits: dict[str, EditConfig] = field(default_factory=dict)  # group -> options of its edit; absent: off
    extra: dict[str, PartConfig] = field(default_factory=dict)  # group that a plugin adds -> options of its part
    references: dict[str, str] = field(default_factory=dict)  # option path -> its reference "${oc.env:NAME}"

    @property
    def seed(self) -> int:
        return self.job.seed

    @property
    def steps(self) -> int:
        return self.job.steps

    @property
    def deterministic(self) -> bool:
        return self.job.deterministic

    def iterate_sections(self) -> Iterator[tuple[str, Any]]:
        """Yield the sections with the names that a user types: `run`, `batch` and `validate`."""
        yield from {"run": self.job, "batch": self.batch, "validate": self.validate}.items()

    def iterate_parts(self) -> Iterator[tuple[str, PartConfig]]:
        """Yield the configuration of every chosen part with its group or path ("track.jsonl")."""
        for section in fields(self):
            if isinstance(config := getattr(self, section.name), PartConfig):
                yield section.name, config
        for group, configs in (("track", self.track), ("health", self.health), ("callback", self.callback)):
            for name, config in configs.items():
                yield f"{group}.{name}", config
        yield from self.edits.items()
        yield from self.extra.items()
