"""The hooks a plugin may implement. They take no arguments and return descriptors, so no signature can ever break.

Each docstring below holds a whole working plugin: a module, registered in its pyproject.toml as

    [project.entry-points."gangline.v1"]
    watched = "gangline_watched"

Every command imports the module, so it imports neither torch nor its own working modules at its top: `build` names
what is imported when a run has chosen the part. (The examples keep all in one file, with torch inside functions.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pluggy

from gangline.plugin.parts import Part

PROJECT = "gangline"
DISTRIBUTION = "gangline-core"  # that this module comes with
ENTRY_POINTS = "gangline.v1"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A verb of `gangline`: ``run(argv) -> exit code``, named by "package.module:function" and imported when called."""

    name: str
    run: str
    summary: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of plugin: what `gangline new-plugin NAME --kind KIND` writes, and the suite that tests such parts."""

    name: str  # what the author types after --kind
    group: str  # of the parts: "track", or "outer/field"; "" where the plugin opens a group of its own or adds a verb
    suite: str  # "package.module:Class", a suite of the conformance kit or one that derives from it
    example: str  # a whole plugin: the files of "package.module", the text "module:NAME", or what the hook :name shows
    summary: str


@hookspec
def gangline_parallel_strategies() -> Iterable[Part]:
    """Offer ways to cut the model and the batch over the mesh. Users choose one: ``parallel=<name>``.

    ::

        # gangline_watched.py: one process that reports how many gradients are exactly zero. train parallel=watched
        from dataclasses import dataclass, replace

        from gangline import Part, hookimpl
        from gangline_basics.parallel.config import Single


        @dataclass
        class Watched(Single):
            pass


        def build(config, job):
            from gangline_basics.parallel.single import SingleRuntime

            class WatchedRuntime(SingleRuntime):
                def step(self, microbatches):
                    result = super().step(microbatches)
                    gradients = [piece.tensor.grad for named in self.parameters() for piece in named.pieces]
                    zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
                    return replace(result, metrics={**result.metrics, "zero_gradients": zeros})

            return WatchedRuntime(job, config.groups)


        @hookimpl
        def gangline_parallel_strategies():
            yield Part(name="watched", config=Watched, build="gangline_watched:build", summary="Counts zero gradients")
    """
    return ()


@hookspec
def gangline_precisions() -> Iterable[Part]:
    """Offer numbers to compute with. Users choose one: ``precision=<name>``.

    ::

        # gangline_coarse.py: float32, but what is multiplied is rounded to bfloat16 first. train precision=coarse
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.config import PrecisionConfig


        @dataclass
        class Coarse(PrecisionConfig):
            weights_too: bool = True  # round the weights as well as what comes in


        def build(config, run):
            import torch

            from gangline.precision import Precision

            class CoarsePrecision(Precision):
                param_dtype = compute_dtype = reduce_dtype = grad_dtype = torch.float32

                def linear(self, x, w, b=None):
                    w = w.bfloat16().float() if config.weights_too else w
                    return torch.nn.functional.linear(x.bfloat16().float(), w, b)

            return CoarsePrecision()


        @hookimpl
        def gangline_precisions():
            yield Part(name="coarse", config=Coarse, build="gangline_coarse:build", summary="Rounds before products")
    """
    return ()


@hookspec
def gangline_checkpointers() -> Iterable[Part]:
    """Offer ways to keep a run's state. Users choose one: ``checkpoint=<name>``.

    ::

        # gangline_elsewhere.py: torch's checkpoints, kept outside the run directory. train checkpoint=elsewhere
        from dataclasses import dataclass
        from pathlib import Path

        from gangline import Part, hookimpl
        from gangline_basics.checkpoint.config import TorchCheckpoint


        @dataclass
        class Elsewhere(TorchCheckpoint):
            folder: str = "/tmp"  # a directory for each run is made in it


        def build(config, run, store):
            from gangline_basics.checkpoint.torch_dcp import DcpCheckpointer

            checkpointer = DcpCheckpointer(run.run.dir, config.keep_last)
            checkpointer.directory = Path(config.folder) / Path(run.run.dir).name
            checkpointer.directory.mkdir(parents=True, exist_ok=True)
            return checkpointer


        @hookimpl
        def gangline_checkpointers():
            yield Part(name="elsewhere", config=Elsewhere, build="gangline_elsewhere:build", summary="Kept elsewhere")
    """
    return ()


@hookspec
def gangline_data_sources() -> Iterable[Part]:
    """Offer data. Users choose one: ``data=<name>``.

    ::

        # gangline_counting.py: sequences that count upwards, each from a start of its own. train data=counting
        from dataclasses import dataclass

        import numpy as np

        from gangline import Part, hookimpl
        from gangline.config import DataConfig, PositiveInt
        from gangline.data.base import DataSource


        @dataclass
        class Counting(DataConfig):
            stride: PositiveInt = 1  # from one number to the next


        class CountingSource(DataSource):
            def __init__(self, config, run, split):
                self.stride, self.modulus = config.stride, run.model.vocab_size
                self.sequence_length = run.batch.sequence_length
                self.first = 0 if split == "train" else 1

            def sample(self, i):
                start = 2 * i + self.first  # a pure function of (split, i): no state, no rank
                return {"tokens": (start + self.stride * np.arange(self.sequence_length + 1)) % self.modulus}

            def length(self):
                return self.modulus // 2  # samples in an epoch; None: without end

            def fingerprint(self):
                return f"counting-{self.stride}-{self.sequence_length}-{self.modulus}-{self.first}"


        @hookimpl
        def gangline_data_sources():
            yield Part(name="counting", config=Counting, build="gangline_counting:CountingSource", summary="Counts up")
    """
    return ()


@hookspec
def gangline_health_checks() -> Iterable[Part]:
    """Offer checks of the running run. Users choose any number: ``health=[<name>,...]``.

    ::

        # gangline_ceiling.py: a loss above a ceiling gets a warning. train 'health=[ceiling]' health.ceiling.above=8
        from dataclasses import dataclass

        from gangline import Part, hookimpl
        from gangline.config import HealthConfig
        from gangline.health import Action, HealthCheck, Verdict


        @dataclass
        class Ceiling(HealthConfig):
            above: float = 8.0  # nats


        class CeilingCheck(HealthCheck):
            def __init__(self, config, run):
                self.above = config.above

            def observe(self, record):
                if record.loss > self.above:
                    evidence = f"loss {record.loss:.3f} is above {self.above:g}"
                    yield Verdict("high-loss", f"step {record.step}", 1.0, evidence, Action.WARN)


        @hookimpl
        def gangline_health_checks():
            yield Part(name="ceiling", config=Ceiling, build="gangline_ceiling:CeilingCheck", summary="A high loss")
    """
    return ()


@hookspec
def gangline_parts() -> Iterable[Part]:
    """Offer anything else, each part naming its `group`: models, optimizers, callbacks, model edits, your own groups.

    A model edit, which opens a group that nobody had before::

        # gangline_narrow.py: feed-forwards of a fraction of their width. train narrow=on narrow.by=4
        from dataclasses import dataclass, replace

        from gangline import Part, hookimpl
        from gangline.config import EditConfig, PositiveInt


        @dataclass
        class Narrow(EditConfig):
            by: PositiveInt = 2  # how many times narrower


        def edit(tree, plan, options):
            from gangline_basics.model.decoder_nodes import FeedForwardNode
            from gangline.model.tree import nodes, replaced

            found = {path: node for path, node in nodes(tree) if isinstance(node, FeedForwardNode)}
            for path, node in found.items():
                tree = replaced(tree, path, replace(node, hidden=node.hidden // options.by))
            return tree, plan, list(found)  # what was claimed: another edit of the same nodes is refused


        @hookimpl
        def gangline_parts():
            yield Part(group="narrow", name="on", config=Narrow, build="gangline_narrow:edit", summary="Less width")
    """
    return ()


@hookspec
def gangline_commands() -> Iterable[Command]:
    """Offer verbs of the `gangline` command.

    ::

        # gangline_listing.py: list the runs of a folder. gangline listing
        import argparse
        from pathlib import Path

        from gangline import Command, hookimpl


        def main(argv):
            parser = argparse.ArgumentParser(prog="gangline listing", description="List the runs of a folder.")
            parser.add_argument("folder", nargs="?", default="runs")
            for path in sorted(Path(parser.parse_args(argv).folder).glob("*/config.yaml")):
                print(path.parent)
            return 0


        @hookimpl
        def gangline_commands():
            yield Command(name="listing", run="gangline_listing:main", summary="List the runs of a folder")
    """
    return ()


@hookspec
def gangline_kinds() -> Iterable[Kind]:
    """Offer kinds of plugins to start from: for the groups that a plugin opens to others.

    Core's own kinds are offered here too. An example is a whole plugin, which `gangline new-plugin` renames.

    ::

        # gangline_starts.py: one more plugin to start from. gangline new-plugin mine --kind whisper
        from gangline import Kind, hookimpl

        EXAMPLE = '''
            # gangline_whisper.py: every step in small letters. train track=[whisper]
            from dataclasses import dataclass
            from gangline import Part, hookimpl
            from gangline.config import TrackConfig
            from gangline.track import Tracker

            @dataclass
            class Whisper(TrackConfig):
                pass

            class WhisperTracker(Tracker):
                def __init__(self, config, run): ...
                def record(self, record): print(f"step {record.step}: {record.loss:.2f}")

            @hookimpl
            def gangline_parts():
                build = "gangline_whisper:WhisperTracker"
                yield Part(group="track", name="whisper", config=Whisper, build=build, summary="Small letters")
            '''

        @hookimpl
        def gangline_kinds():
            where = {"suite": "gangline_testkit:TrackerSuite", "example": "gangline_starts:EXAMPLE"}
            yield Kind(name="whisper", group="track", **where, summary="a quiet tracker")
    """
    return ()


# Which group the parts of a hook belong to; gangline_parts names it part by part.
GROUP_OF = {
    "gangline_parallel_strategies": "parallel",
    "gangline_precisions": "precision",
    "gangline_checkpointers": "checkpoint",
    "gangline_data_sources": "data",
    "gangline_health_checks": "health",
}
