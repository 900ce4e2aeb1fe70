"""Three parts that require each other, parts with unmet requirements, and a strategy with a nested strategy."""

from __future__ import annotations

from dataclasses import dataclass, field

from gangline import Part, hookimpl
from gangline.config.schema import CallbackConfig, ParallelConfig
from gangline_basics.optimizer.config import Adamw
from gangline_basics.parallel.config import Ddp, Single


@dataclass
class Paired(Ddp):
    pass


@dataclass
class PairedAdamw(Adamw):
    pass


@dataclass
class PairedWatch(CallbackConfig):
    pass


@dataclass
class NeedyDdp(Ddp):
    pass


@dataclass
class AbsentWatch(CallbackConfig):
    pass


@dataclass
class StrayWatch(CallbackConfig):
    pass


@dataclass
class Around(ParallelConfig):
    inner: ParallelConfig = field(default_factory=Single)
    replicas: int = 1

    def size_axes(self, world: int) -> dict[str, int]:
        return self.inner.size_axes(world)


@hookimpl
def gangline_parallel_strategies():
    needs = ("optimizer=paired", "callback=paired")
    yield Part(name="paired", config=Paired, build="gangline_basics.parallel.ddp:build", summary="Paired", needs=needs)
    build = "gangline_basics.parallel.ddp:build"
    yield Part(name="needy", config=NeedyDdp, build=build, summary="Needs one", needs=("optimizer=paired",))
    yield Part(
        name="around",
        config=Around,
        build="method_parts:build_around",
        summary="Around another strategy",
        opens={"inner": "single"},
        views={"inner": "parallel"},
    )


@hookimpl
def gangline_optimizers():
    build = "gangline_basics.optimizer.adamw:build"
    yield Part(name="paired", config=PairedAdamw, build=build, summary="Paired", needs=("parallel=paired",))


@hookimpl
def gangline_callbacks():
    build = "method_parts:build_watch"
    yield Part(name="paired", config=PairedWatch, build=build, summary="Paired")
    yield Part(name="absent", config=AbsentWatch, build=build, summary="Lacks one", needs=("optimizer=absent",))
    yield Part(name="stray", config=StrayWatch, build=build, summary="Lacks a group", needs=("weather=sun",))


def build_around(config, job):
    """Build the nested strategy that the user has chosen."""
    from gangline.plugin.registry import build

    return build(config.inner, job)


def build_watch(config, run):
    from gangline.callback import Callback

    class Watch(Callback):
        pass

    return Watch()
