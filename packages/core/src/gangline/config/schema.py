"""A complete run as typed dataclasses, filled by Hydra or in plain Python and read by every rank. Torch-free.

Each group has a base class for the configurations of its parts; `Run` has one of each group. Arguments and result of
each part's build function are in `gangline.plugin.hooks.HOOKS`.
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
    """The base of every part's configuration.

    `file_options` names the options that hold paths of files: one path, a list, or a mapping to paths. A relative path
    is relative to the directory where the run was started, and is written as an absolute path into config.yaml. A URL
    (s3://...) is not changed.
    `layout_options` names the options that set the layout and do not define the run: they may change on a resume.
    """

    file_options: ClassVar[tuple[str, ...]] = ()
    layout_options: ClassVar[tuple[str, ...]] = ()

    def check(self, run: Run) -> list[Problem]:
        """Return all mistakes in these options that can be found before torch is imported."""
        return []

    def list_notices(self, run: Run) -> list[str]:
        """Return warnings about choices that work and are probably not wanted; printed once when the run starts."""
        return []

    def list_sidecars(self, run: Run) -> list[Sidecar]:
        """Return processes that run next to the ranks of each machine, and start before them."""
        return []

    def preload(self, run: Run) -> list[str]:
        """Return the names of modules that every rank needs: a server that forks the ranks imports them once."""
        return []

    def get_environment(self, run: Run) -> dict[str, str]:
        """Return environment variables to set on every rank before torch connects it, unless the user has set them.

        Two parts of a run that set one variable to different values are refused.
        """
        return {}

    def wrap(self, run: Run, comms: Comms) -> Comms:
        """Return `comms`, or a wrapper (`gangline.comm.wrap.WrappedComms`) that measures, delays or breaks traffic.

        Called on every rank before anything is built; a later part of the run wraps the result of an earlier one.
        `gangline.comm.purpose.get_purpose` returns what a collective is for, such as gradients or losses.
        """
        return comms


@dataclass
class ModelConfig(PartConfig):
    """Options of a model. The tree consists of config nodes; the plan is a `gangline.plan.Plan`. Torch-free."""

    vocab_size: PositiveInt = 256  # vocabulary size: number of different tokens

    def get_weights_directory(self) -> str | None:
        """Return the directory of pretrained weights that the run starts from, or None for initialized weights."""
        return None


@dataclass
class EditConfig(PartConfig, EditedWeights):
    """Options of a model edit. The function that a part names in `build` is the edit itself. Pure and torch-free.

    A group whose parts derive from this is a group of edits. Core adds the choice `off`. Edits run in order of group
    name. Two edits that claim the same path, or a path inside another's, are an error.

    `wraps`: the edit only puts `gangline.model.tree.WrapNode`s around nodes (adapters around linears). It runs after
    all edits that do not, and may claim paths that others claim; if several wrap one node, the first is innermost.

    The methods below are optional.
    """

    wraps: ClassVar[bool] = False

    def resolve(self, run: Run) -> EditConfig:
        """Return these options with unset ones derived from the run; the edit is called with the result."""
        return self

    def summarise(self, metrics: Mapping[str, float | list[float]]) -> dict[str, float | list[float]]:
        """Return further numbers for a step's record from emitted metrics; a pure function, called on every rank."""
        return {}

    def fill_init_weights(self, run: Run, shards: Sequence[Shard], plan: Plan) -> None:
        """Change initial weights in place.

        Called once on every rank, after the weights are drawn, unless a checkpoint fills the model.
        shards: this rank's `model/...` arrays.
        """

    def iterate_layouts(self, run: Run, world: int) -> Iterator[EditConfig]:
        """Yield these options, and variants that change the sharding over ranks but not the computed result."""
        yield self


@dataclass
class ParallelConfig(PartConfig):
    """Options of a strategy. The job is a `gangline.runtime.Job` and contains the run."""

    reduces: ClassVar[bool] = False  # whether it sums gradients with `job.reduction`; else `gradients` must be plain

    def count_ranks(self, gpus: int) -> int:
        """Return how many processes to start if the user set no number."""
        return max(1, gpus)

    def size_axes(self, world: int) -> dict[str, int]:
        """Return axis sizes, slowest tier first, with product `world`. Raises UserError if there is no such layout."""
        return {"dp_replicate": world}

    def count_microbatches(self, share: int, mesh: Mesh) -> int:
        """Return the number of microbatches of a rank's `share` of a batch if the user set none: a divisor of it."""
        return 1

    def explain(
        self, run: Run, mesh: Mesh, model: tuple[Node, Plan] | None = None, topology: Topology | None = None
    ) -> Explained | None:
        """Return the memory, traffic and computation of a step in this layout; None if the strategy has no estimate.

        The run must pass `check`. model: the run's model (`compose_model`), if the caller has it.
        topology: the network; None: that of the part's own options, else 8 GPUs per node.
        """
        return None

    def compute_bounds(
        self, run: Run, mesh: Mesh, model: tuple[Node, Plan], topology: Topology | None = None
    ) -> LayoutBounds | None:
        """Return lower bounds on the cost of `run` with these options; None if there is no such layout.

        model, topology: as in `explain`. Options whose stages do the same work must return the same `work` object, so
        that a planner prices it once.
        """
        return LayoutBounds()

    def iterate_layouts(self, run: Run, world: int) -> Iterator[ParallelConfig]:
        """Yield options with which `world` ranks could train the run, these included; some may not pass `check`."""
        yield self


@dataclass
class GradientsConfig(PartConfig, GradientSizes):
    """Options of how gradients are summed over data-parallel ranks."""

    plain: ClassVar[bool] = False  # whether it is the sum of `Comm.all_reduce`; strategies may use other collectives


@dataclass
class PrecisionConfig(PartConfig):
    """Options of a precision."""

    finds_scale: ClassVar[bool] = False  # whether it finds a loss scale: steps that overflow are skipped

    def get_sizes(self) -> ItemSizes:
        """Return the bytes per number of this precision, to plan memory and traffic."""
        return ItemSizes(compute=2, master=4, gradient=4, wire=4)

    def get_product_format(self) -> str:
        """Return the number format of the matmuls of blocks, by its name in a cluster file, such as "bf16"."""
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
        """Return `warmup_steps`, or its default if it is None."""
        return run.steps // 20 if self.warmup_steps is None else self.warmup_steps


@dataclass
class CheckpointConfig(PartConfig):
    """Options of a checkpointer. The store is the key-value store of the job."""

    every: PositiveInt | Literal["auto"] | None = None  # steps between checkpoints; auto if supported; null: at end
    at_end: bool = True  # final checkpoint after the last step
    save_frozen: bool = True  # frozen weights in checkpoints; false: they are drawn or loaded from model.weights again


@dataclass
class DataConfig(PartConfig):
    """Options of a data source. The split is "train" or "validation"."""

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    path: str | list[str] | None = None  # data path or list of paths; null: the source's own data

    def build_codec(self, run: Run) -> Codec | None:
        """Return the tokenizer, without reading the data; None: ask the source. Raises UserError."""
        return None

    def build_chat_template(self, run: Run) -> RendersChats | None:
        """Return the chat template of this data; None: that of the tokenizer. Raises UserError."""
        return None

    def export_files(self, run: Run) -> dict[str, bytes]:
        """Return the tokenizer's files, by name, for the directory of an exported model. Raises UserError."""
        return {}


@dataclass
class CallbackConfig(PartConfig):
    """Options of a callback."""

    def count_copies(self, run: Run) -> int:
        """Return how many arrays like each trained parameter it stores (`allocate_like`), to plan memory."""
        return 0


@dataclass
class HealthConfig(PartConfig):
    """Options of a health check."""


@dataclass
class TrackConfig(PartConfig):
    """Options of a tracker. Only global rank 0 builds trackers."""


@dataclass
class LaunchConfig(PartConfig):
    """Options of a launcher. It gets a run directory and starts the processes."""

    shares: ClassVar[bool] = False  # whether commands on several nodes are one job and share its run directory
    here: ClassVar[bool] = True  # whether ranks run on the machine of the command; else a scheduler starts them
    at_once: ClassVar[bool] = False  # whether the launcher takes the runs of a sweep together, by `launch_all`

    processes: PositiveInt | None = None  # number of ranks; null: as the strategy requests, usually one per GPU
    timeout_seconds: PositiveFloat = 1800.0  # collective timeout in seconds: a longer transfer ends the run
    signal_seconds: PositiveFloat | None = None  # seconds from a scheduler's signal to SIGKILL; null: no limit

    def count_ranks(self, run: Run) -> int:
        """Return the number of ranks on all nodes: what the user set, else what the strategy requests."""
        from gangline.launch.devices import count_gpus

        return self.processes or run.parallel.count_ranks(count_gpus(run.job.device) * self.count_max_nodes())

    def count_max_nodes(self) -> int:
        """Return the maximum number of nodes."""
        return 1

    def find_refusals(self, run: Run) -> list[Problem]:
        """Return the problems that prevent a start of the ranks. Called for a run that passes all other checks."""
        return []

    def get_seconds_to_stop(self) -> float | None:
        """Return the seconds from a request to stop until the ranks are killed; None: no limit."""
        return None


@dataclass
class SimulatorConfig(PartConfig):
    """Options of a simulator of failures. Commands build simulators; a run does not."""


@dataclass
class Run:
    """One run: sections of values, and one configuration for each part that was chosen.

    The class of a configuration says which part it belongs to (`gangline.plugin.registry.Installed.find_part`).
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
    edits: dict[str, EditConfig] = field(default_factory=dict)  # group -> the chosen edit; absent: off
    extra: dict[str, PartConfig] = field(default_factory=dict)  # groups that plugins add to core's groups
    references: dict[str, str] = field(default_factory=dict)  # path -> "${oc.env:NAME}", written instead of its value

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
