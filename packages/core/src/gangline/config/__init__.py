"""From the command line to typed dataclasses: what every part's `config.py` imports. Torch-free.

The bases of the groups' configurations and the ranges of their options, what a check may ask of a run and offer in its
message, and runs made without a command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.config.advice import nearest as nearest
    from gangline.config.answers import ItemSizes as ItemSizes, LayoutBounds as LayoutBounds
    from gangline.config.check import (
        layout_problems as layout_problems,
        meaningless as meaningless,
        world_of as world_of,
    )
    from gangline.config.compose import compose_one as compose_one
    from gangline.config.defaults import default_run as default_run
    from gangline.config.fields import stated as stated
    from gangline.config.schema import (
        CallbackConfig as CallbackConfig,
        CheckpointConfig as CheckpointConfig,
        DataConfig as DataConfig,
        EditConfig as EditConfig,
        HealthConfig as HealthConfig,
        LaunchConfig as LaunchConfig,
        ModelConfig as ModelConfig,
        OptimizerConfig as OptimizerConfig,
        ParallelConfig as ParallelConfig,
        PartConfig as PartConfig,
        PrecisionConfig as PrecisionConfig,
        Run as Run,
        ScheduleConfig as ScheduleConfig,
        TrackConfig as TrackConfig,
    )
    from gangline.config.sections import (
        BatchSection as BatchSection,
        Recompute as Recompute,
        RunSection as RunSection,
        ValidateSection as ValidateSection,
    )
    from gangline.config.serial import from_dict as from_dict, to_dict as to_dict
    from gangline.config.suggest import near as near
    from gangline.ranges import (
        AnyNumber as AnyNumber,
        AtLeast as AtLeast,
        AtMost as AtMost,
        LessThan as LessThan,
        MoreThan as MoreThan,
        NonNegativeFloat as NonNegativeFloat,
        NonNegativeInt as NonNegativeInt,
        OneOf as OneOf,
        OrInfinite as OrInfinite,
        PositiveFloat as PositiveFloat,
        PositiveInt as PositiveInt,
        RunsCode as RunsCode,
        Share as Share,
        ShareBelowOne as ShareBelowOne,
        divisors as divisors,
        listed_divisors as listed_divisors,
    )
    from gangline.run.directory import holds_checkpoint as holds_checkpoint

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.config.schema": (
            "CallbackConfig CheckpointConfig DataConfig EditConfig HealthConfig LaunchConfig ModelConfig "
            "OptimizerConfig ParallelConfig PartConfig PrecisionConfig Run ScheduleConfig TrackConfig"
        ),
        "gangline.config.answers": "ItemSizes LayoutBounds",
        "gangline.config.fields": "stated",
        "gangline.config.sections": "BatchSection Recompute RunSection ValidateSection",
        "gangline.ranges": (
            "AnyNumber AtLeast AtMost LessThan MoreThan NonNegativeFloat NonNegativeInt OneOf OrInfinite "
            "PositiveFloat PositiveInt RunsCode Share ShareBelowOne divisors listed_divisors"
        ),
        "gangline.config.check": "layout_problems meaningless world_of",
        "gangline.config.advice": "nearest",
        "gangline.config.suggest": "near",
        "gangline.config.compose": "compose_one",
        "gangline.config.defaults": "default_run",
        "gangline.config.serial": "from_dict to_dict",
        "gangline.run.directory": "holds_checkpoint",
    },
)
