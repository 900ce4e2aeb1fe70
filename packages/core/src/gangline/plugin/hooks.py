"""The table of hooks: each kind of part that a plugin may offer, its group, and the contract of such a part.

A hook is a function of a plugin's entry module, marked with `hookimpl`. Hooks take no arguments and return
descriptors, so no signature can ever break. The specification of each hook, with a complete plugin as its example, is
in the module of `gangline.plugin.specs` that its row names. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pluggy

from gangline.config.schema import (
    CallbackConfig,
    CheckpointConfig,
    DataConfig,
    EditConfig,
    GradientsConfig,
    HealthConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PartConfig,
    PrecisionConfig,
    ScheduleConfig,
    SimulatorConfig,
    TrackConfig,
)
from gangline.plugin.parts import Part

PROJECT = "gangline"
DISTRIBUTION = "gangline-core"  # distribution that contains this module
ENTRY_POINTS = "gangline.v1"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `gangline`."""

    name: str  # name that the user types after `gangline`
    run: str  # function (argv) -> exit code, "package.module:function", imported when the command is called
    summary: str  # one-line description in `gangline --help`


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of plugin: what `gangline new-plugin NAME --kind KIND` writes, and the suite that tests such parts."""

    name: str  # name that the author types after --kind
    group: str  # group of its parts: "track", or "outer/field"; "": the plugin opens its own group or adds a verb
    suite: str  # "package.module:Class", a suite of the conformance kit or one that derives from it
    # complete plugin: "package.module" (its files), "module:NAME" (a text constant) or "module:hook" (the example in a
    # hook's specification)
    example: str
    summary: str  # one-line description in `gangline new-plugin --kinds`


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A row of the table of hooks: the parts of a hook, how users choose parts, and what authors of parts implement."""

    name: str  # name of the function in a plugin
    topic: str  # module of gangline.plugin.specs with the specification
    yields: type = Part
    group: str | None = None  # group of all its parts; None: each part names its group
    chosen: Literal["one", "any", "by command"] | None = None  # number of its parts in a run, or built by a command
    options: type[PartConfig] = PartConfig  # base class of the options of a part
    arguments: str = ""  # arguments of the function that a part names in `build`
    returns: str = ""  # result of that function, if it is not an instance of `contract`
    contract: str = ""  # class that the author of a part implements, "package.module.Class"

    @property
    def spec(self) -> str:
        """Return the specification as "package.module:function"."""
        return f"gangline.plugin.specs.{self.topic}:{self.name}"


HOOKS = (
    Hook(
        name="gangline_models",
        topic="model",
        group="model",
        chosen="one",
        options=ModelConfig,
        arguments="config, run",
        returns="(tree, plan)",
        contract="gangline.model.tree.Node",
    ),
    Hook(
        name="gangline_model_edits",
        topic="model",
        options=EditConfig,
        arguments="tree, plan, options",
        returns="(tree, plan, claimed_paths)",
        contract="gangline.model.edit.Edit",
    ),
    Hook(
        name="gangline_parallel_strategies",
        topic="computing",
        group="parallel",
        chosen="one",
        options=ParallelConfig,
        arguments="config, job",
        contract="gangline.runtime.Runtime",
    ),
    Hook(
        name="gangline_precisions",
        topic="computing",
        group="precision",
        chosen="one",
        options=PrecisionConfig,
        arguments="config, run",
        contract="gangline.precision.Precision",
    ),
    Hook(
        name="gangline_gradient_reductions",
        topic="computing",
        group="gradients",
        chosen="one",
        options=GradientsConfig,
        arguments="config, run",
        contract="gangline.gradients.GradientReduction",
    ),
    Hook(
        name="gangline_optimizers",
        topic="learning",
        group="optimizer",
        chosen="one",
        options=OptimizerConfig,
        arguments="config, run, runtime",
        contract="gangline.optimizer.Optimizer",
    ),
    Hook(
        name="gangline_schedules",
        topic="learning",
        group="schedule",
        chosen="one",
        options=ScheduleConfig,
        arguments="config, run",
        contract="gangline.schedule.LearningRateSchedule",
    ),
    Hook(
        name="gangline_checkpointers",
        topic="storage",
        group="checkpoint",
        chosen="one",
        options=CheckpointConfig,
        arguments="config, run, store",
        contract="gangline.checkpoint.base.Checkpointer",
    ),
    Hook(
        name="gangline_data_sources",
        topic="storage",
        group="data",
        chosen="one",
        options=DataConfig,
        arguments="config, run, split",
        contract="gangline.data.base.DataSource",
    ),
    Hook(
        name="gangline_trackers",
        topic="observing",
        group="track",
        chosen="any",
        options=TrackConfig,
        arguments="config, run",
        contract="gangline.track.Tracker",
    ),
    Hook(
        name="gangline_health_checks",
        topic="observing",
        group="health",
        chosen="any",
        options=HealthConfig,
        arguments="config, run",
        contract="gangline.health.HealthCheck",
    ),
    Hook(
        name="gangline_callbacks",
        topic="observing",
        group="callback",
        chosen="any",
        options=CallbackConfig,
        arguments="config, run",
        contract="gangline.callback.Callback",
    ),
    Hook(
        name="gangline_launchers",
        topic="jobs",
        group="launch",
        chosen="one",
        options=LaunchConfig,
        arguments="config, run",
        contract="gangline.launch.base.Launcher",
    ),
    Hook(
        name="gangline_simulators",
        topic="jobs",
        group="simulator",
        chosen="by command",
        options=SimulatorConfig,
        arguments="config",
        contract="gangline.explain.reliability.FailureSimulator",
    ),
    Hook(name="gangline_parts", topic="opening"),
    Hook(name="gangline_commands", topic="opening", yields=Command),
    Hook(name="gangline_kinds", topic="opening", yields=Kind),
)

BY_NAME = {hook.name: hook for hook in HOOKS}
BY_GROUP = {hook.group: hook for hook in HOOKS if hook.group}

# The groups of a run, in the order in which they are shown, and the base class of the options of their parts.
GROUPS = {group: hook.options for group, hook in BY_GROUP.items() if hook.chosen in ("one", "any")}
SINGLE = tuple(group for group in GROUPS if BY_GROUP[group].chosen == "one")
LISTS = tuple(group for group in GROUPS if BY_GROUP[group].chosen == "any")
