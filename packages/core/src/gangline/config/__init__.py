"""Config dataclasses: the names that every part's `config.py` imports to declare its options. Torch-free.

The package exports the base class of each group's options, types with ranges, `Run` and its sections, the data that
methods of a configuration return, and functions that list divisors.
"""

from gangline.config.answers import ItemSizes as ItemSizes, LayoutBounds as LayoutBounds, Sidecar as Sidecar
from gangline.config.ranges import (
    NonNegativeFloat as NonNegativeFloat,
    NonNegativeInt as NonNegativeInt,
    OneOf as OneOf,
    PositiveFloat as PositiveFloat,
    PositiveInt as PositiveInt,
    RunsCode as RunsCode,
    Share as Share,
    ShareBelowOne as ShareBelowOne,
    find_divisors as find_divisors,
    list_divisors as list_divisors,
)
from gangline.config.schema import (
    CallbackConfig as CallbackConfig,
    CheckpointConfig as CheckpointConfig,
    DataConfig as DataConfig,
    EditConfig as EditConfig,
    GradientsConfig as GradientsConfig,
    HealthConfig as HealthConfig,
    LaunchConfig as LaunchConfig,
    ModelConfig as ModelConfig,
    OptimizerConfig as OptimizerConfig,
    ParallelConfig as ParallelConfig,
    PartConfig as PartConfig,
    PrecisionConfig as PrecisionConfig,
    Run as Run,
    ScheduleConfig as ScheduleConfig,
    SimulatorConfig as SimulatorConfig,
    TrackConfig as TrackConfig,
)
from gangline.config.sections import (
    BatchSection as BatchSection,
    Recompute as Recompute,
    RunSection as RunSection,
    ValidateSection as ValidateSection,
)
