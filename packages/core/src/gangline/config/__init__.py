"""From the command line to typed dataclasses: what every part's `config.py` imports. Torch-free.

The bases of the groups' configurations and the ranges of their options, what a check may ask of a run and offer in its
message, and runs made without a command line.
"""

from gangline.config.answers import (
    ItemSizes as ItemSizes,
    LayoutBounds as LayoutBounds,
    Sidecar as Sidecar,
)
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
