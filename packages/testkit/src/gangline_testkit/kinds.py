"""The kinds of plugins that core knows: what each starts from, and the suite that it passes. Torch-free."""

from __future__ import annotations

from gangline.plugin.hooks import Kind

_SUITES, _EXAMPLES, _HOOKS = "gangline_testkit", "gangline_testkit.examples", "gangline.plugin.hooks"

KINDS = tuple(
    Kind(name=name, group=group, suite=f"{_SUITES}:{suite}", example=example, summary=summary)
    for name, group, suite, example, summary in (
        ("tracker", "track", "TrackerSuite", f"{_EXAMPLES}.mine", "where records go"),
        ("health", "health", "HealthCheckSuite", f"{_HOOKS}:gangline_health_checks", "a check of the run"),
        ("callback", "callback", "CallbackSuite", f"{_EXAMPLES}.streak", "what acts while a run lives"),
        ("data", "data", "DataSourceSuite", f"{_HOOKS}:gangline_data_sources", "what a run reads"),
        ("model", "model", "PartSuite", f"{_EXAMPLES}.squared", "a model of one's own"),
        ("edit", "", "ModelEditSuite", f"{_HOOKS}:gangline_parts", "a change of the model"),
        ("optimizer", "optimizer", "OptimizerSuite", f"{_EXAMPLES}.signum", "how weights are stepped"),
        ("schedule", "schedule", "ScheduleSuite", f"{_EXAMPLES}.rsqrt", "the learning rate over the run"),
        ("precision", "precision", "PrecisionSuite", f"{_HOOKS}:gangline_precisions", "how it computes"),
        (
            "checkpoint",
            "checkpoint",
            "CheckpointerSuite",
            f"{_HOOKS}:gangline_checkpointers",
            "keeps state",
        ),
        ("strategy", "parallel", "StrategySuite", f"{_HOOKS}:gangline_parallel_strategies", "cuts the run"),
        ("gradients", "gradients", "GradientsSuite", f"{_EXAMPLES}.heaviest", "how gradients are summed over ranks"),
        ("launcher", "launch", "PartSuite", f"{_EXAMPLES}.timed", "how processes are started"),
        ("simulator", "simulator", "SimulatorSuite", f"{_EXAMPLES}.expected", "what failures cost a long job"),
        ("group", "", "PartSuite", f"{_EXAMPLES}.greeting", "a group of one's own, and the part that reads it"),
        ("command", "", "CommandSuite", f"{_HOOKS}:gangline_commands", "a verb of gangline"),
    )
)
