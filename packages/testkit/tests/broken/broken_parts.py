"""Plugin of the parts with one fault each, which the conformance kit must detect. Torch-free entry module."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from gangline.config.schema import (
    EditConfig,
    GradientsConfig,
    HealthConfig,
    PrecisionConfig,
    ScheduleConfig,
    SimulatorConfig,
    TrackConfig,
)
from gangline.plugin.hooks import hookimpl
from gangline.plugin.parts import Part
from gangline_basics.optimizer.config import Adamw
from gangline_basics.precision.config import Fp16
from gangline_testkit.toys.plugin import Files, Lanes, Nan, Numbers, Previous, Rows

PARTS: dict[str, list[Part]] = {}


def broken(group: str, base: type, module: str, *names: str) -> None:
    """Add a part `group=<name>` for each name. Its class in `module` has the same name in camel case."""
    for name in names:
        title = "".join(word.title() for word in name.split("-"))
        config = dataclass(type(f"{title}Config", (base,), {"__module__": __name__}))
        globals()[config.__name__] = config
        part = Part(
            name="on" if group == "edit" else name,
            config=config,
            build=f"{module}:{title}",
            summary="a mutant",
            group=name.replace("-", "_") if group == "edit" else None,
        )
        PARTS.setdefault(group, []).append(part)


broken(
    "parallel",
    Rows,
    "broken_strategies",
    "averages",
    "unmarked",
    "forgets-vectors",
    "local-tokens",
    "says-the-mean",
    "counts-twice",
    "steps-on-nan",
    "shares-folds",
    "stale",
    "never-tells",
    "misplaces",
    "arrival-order",
    "evaluates-alone",
    "evaluates-in-training",
    "evaluates-by-share",
    "repeats-matrices",
    "maps-pieces",
    "maps-elsewhere",
    "clips-vectors",
    "clips-by-the-step",
    "forgets-a-share",
    "scores-backwards",
)
broken(
    "checkpoint",
    Files,
    "broken_checkpointers",
    "drops-optimizer",
    "ignores-offsets",
    "lazy",
    "visible-too-soon",
    "settles-early",
    "commits-early",
    "overwrites",
    "unchecked",
    "newest",
    "forgets-document",
    "hides-full-disk",
    "keeps-damage-to-itself",
    "counts-unreadable",
    "trusts-names",
)
broken(
    "data",
    Numbers,
    "broken_others",
    "repeats",
    "off-after-resume",
    "differs-by-width",
    "forgets-masks",
    "reads-after-close",
    "fills-too-early",
    "validates-by-rank",
    "leaves-out",
    "no-length",
    "call-order",
    "ignores-split",
    "one-fingerprint",
    "per-process",
    "too-short",
)
broken("health", Nan, "broken_others", "jumpy", "forgetful", "chatty", "blind", "tidy")
broken("health", HealthConfig, "broken_others", "proud")
broken("health", Nan, "broken_callbacks", "counts-itself", "remembers", "cries", "gathers")
broken(
    "callback",
    Previous,
    "broken_callbacks",
    "meddles",
    "forgets-state",
    "forgets-arrays",
    "own-metrics",
    "says-whole",
    "asks-on-error",
    "needs-its-state",
    "leaves-others",
)
broken(
    "edit",
    Lanes,
    "broken_edits",
    "in-place",
    "claims-nothing",
    "no-init",
    "dead-pattern",
    "own-lanes",
    "dice",
    "heavy",
    "boasts",
)
broken(
    "edit",
    EditConfig,
    "broken_edits",
    "own-tokens",
    "config-sizes",
    "undeclared-partial",
    "remembers",
    "low-rank",
    "idle",
    "shifts",
    "swaps-attention",
)
broken("track", TrackConfig, "broken_others", "needs-mfu", "drops", "appends", "littering", "scaling")
broken(
    "precision",
    PrecisionConfig,
    "broken_precisions",
    "no-bias",
    "crooked-gradient",
    "scribbles",
    "low-masters",
    "coarse",
)
broken(
    "gradients",
    GradientsConfig,
    "broken_reductions",
    "apart",
    "averages-ranks",
    "wrong-range",
    "one-scratch",
    "forgets",
    "grows",
    "dice",
    "silent",
)


class Refunds(GradientsConfig):
    def count_sent(self, size, ranks, scatters, itemsize):
        return -1.0


broken("gradients", Refunds, "broken_reductions", "negative")
broken("gradients", GradientsConfig, "broken_reductions", "gathers-all", "hoards", "swallows")
broken("precision", Fp16, "broken_precisions", "scale-forgets", "scale-grows", "scale-ignored")


class Halved(Previous):
    def wrap(self, run, comms):
        from broken_callbacks import HalvedComm

        from gangline.comm.wrap import WrappedComms

        return WrappedComms(comms, HalvedComm)


class Swapped(Previous):
    def wrap(self, run, comms):
        from broken_callbacks import SwappedComm

        from gangline.comm.wrap import WrappedComms

        return WrappedComms(comms, SwappedComm)


class Exported(Previous):
    def get_environment(self, run):
        os.environ["GANGLINE_BROKEN"] = str(time.monotonic_ns())
        return {}


class Numbered(Previous):
    def get_environment(self, run):
        return {"TORCH_FR_BUFFER_SIZE": 100}


broken("callback", Halved, "broken_callbacks", "halves-traffic")
broken("callback", Swapped, "broken_callbacks", "swaps-ranks")
broken("callback", Exported, "broken_callbacks", "sets-variables")
broken("callback", Numbered, "broken_callbacks", "says-numbers")
broken("optimizer", Adamw, "broken_others", "late-state", "no-counters", "drifts", "local-norm", "copies", "careless")
broken("schedule", ScheduleConfig, "broken_others", "counts-calls", "too-high", "from-nothing", "with-torch")
broken("simulator", SimulatorConfig, "broken_simulators", "loses-time", "remembers-its-dice", "hopeful", "unshaken")


@hookimpl
def gangline_parallel_strategies():
    return PARTS["parallel"]


@hookimpl
def gangline_gradient_reductions():
    return PARTS["gradients"]


@hookimpl
def gangline_checkpointers():
    return PARTS["checkpoint"]


@hookimpl
def gangline_data_sources():
    return PARTS["data"]


@hookimpl
def gangline_health_checks():
    return PARTS["health"]


@hookimpl
def gangline_precisions():
    return PARTS["precision"]


@hookimpl
def gangline_model_edits():
    return PARTS["edit"]


@hookimpl
def gangline_trackers():
    return PARTS["track"]


@hookimpl
def gangline_callbacks():
    return PARTS["callback"]


@hookimpl
def gangline_optimizers():
    return PARTS["optimizer"]


@hookimpl
def gangline_schedules():
    return PARTS["schedule"]


@hookimpl
def gangline_simulators():
    return PARTS["simulator"]
