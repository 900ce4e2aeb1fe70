"""The kinds of plugins that core knows: the example and the conformance suite of each. Torch-free."""

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
        ("tracker", "gangline_trackers", "TrackerSuite", "where records go", ""),
        ("health", "gangline_health_checks", "HealthCheckSuite", "a check of the run", ""),
        ("callback", "gangline_callbacks", "CallbackSuite", "what acts while a run lives", ""),
        ("data", "gangline_data_sources", "DataSourceSuite", "what a run reads", ""),
        ("model", "gangline_models", "PartSuite", "a model of one's own", "gangline_testkit.examples.squared"),
        ("edit", "gangline_model_edits", "ModelEditSuite", "a change of the model", ""),
        ("optimizer", "gangline_optimizers", "OptimizerSuite", "how weights are stepped", ""),
        ("schedule", "gangline_schedules", "ScheduleSuite", "the learning rate over the run", ""),
        ("precision", "gangline_precisions", "PrecisionSuite", "how it computes", ""),
        ("checkpoint", "gangline_checkpointers", "CheckpointerSuite", "keeps state", ""),
        ("strategy", "gangline_parallel_strategies", "StrategySuite", "cuts the run", ""),
        ("gradients", "gangline_gradient_reductions", "GradientsSuite", "how gradients are summed", HEAVIEST),
        ("launcher", "gangline_launchers", "PartSuite", "how processes are started", ""),
        ("simulator", "gangline_simulators", "SimulatorSuite", "what failures cost a long job", ""),
        ("group", "gangline_parts", "PartSuite", "a group of one's own, and the part that reads it", ""),
        ("command", "gangline_commands", "CommandSuite", "a verb of gangline", ""),
    )
)
