"""Kinds of plugins for core's hooks: the example and the conformance suite of each kind. Torch-free."""

from __future__ import annotations

from gangline.plugin.hooks import BY_NAME, Kind

# The example of a kind is the plugin in the specification of its hook, unless the kind names another one.
HEAVIEST = "gangline_testkit.examples.heaviest"
KINDS = tuple(
    Kind(
        name=name,
        group=BY_NAME[hook].group or "",
        suite=f"gangline_testkit:{suite}",
        example=example or BY_NAME[hook].spec,
        summary=summary,
    )
    for name, hook, suite, summary, example in (
        ("tracker", "gangline_trackers", "TrackerSuite", "sends the record of each step to a file or a service", ""),
        ("health", "gangline_health_checks", "HealthCheckSuite", "checks each step of a run and reports faults", ""),
        ("callback", "gangline_callbacks", "CallbackSuite", "runs code at fixed points of each step", ""),
        ("data", "gangline_data_sources", "DataSourceSuite", "reads training and validation samples", ""),
        ("model", "gangline_models", "PartSuite", "defines a model", "gangline_testkit.examples.squared"),
        ("edit", "gangline_model_edits", "ModelEditSuite", "changes a model, for example by adapters", ""),
        ("optimizer", "gangline_optimizers", "OptimizerSuite", "updates the weights", ""),
        ("schedule", "gangline_schedules", "ScheduleSuite", "sets the learning rate of each step", ""),
        ("precision", "gangline_precisions", "PrecisionSuite", "sets the number formats of weights and matmuls", ""),
        ("checkpoint", "gangline_checkpointers", "CheckpointerSuite", "stores and restores the state of a run", ""),
        ("strategy", "gangline_parallel_strategies", "StrategySuite", "shards the model and the batch over ranks", ""),
        (
            "gradients",
            "gangline_gradient_reductions",
            "GradientsSuite",
            "sums gradients over data-parallel ranks",
            HEAVIEST,
        ),
        ("launcher", "gangline_launchers", "PartSuite", "starts the processes of a run", ""),
        ("simulator", "gangline_simulators", "SimulatorSuite", "simulates the cost of failures in a long job", ""),
        ("group", "gangline_parts", "PartSuite", "opens a new group, with a part that reads the choice", ""),
        ("command", "gangline_commands", "CommandSuite", "adds a command to gangline", ""),
    )
)
