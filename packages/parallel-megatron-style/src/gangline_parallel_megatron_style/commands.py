"""`gangline parallel explain | draw`: report the cost of a layout, or draw a pipeline schedule, without a run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gangline import UserError
from gangline.cli.verbs import run_verb
from gangline.config.suggest import suggest_near
from gangline_basics.explain.timeline import ActionTimes
from gangline_basics.figure import write_figure
from gangline_basics.flags import Flags
from gangline_parallel_megatron_style.pipeline.action_times import UNIFORM
from gangline_parallel_megatron_style.pipeline.actions import Schedule
from gangline_parallel_megatron_style.pipeline.draw import Caption, as_text, make_schedule_figure
from gangline_parallel_megatron_style.pipeline.simulate import Timeline

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_basics.cluster.given import GivenNodes

VERBS = {
    "explain": "traffic, memory and idle time of a layout, computed without a GPU and without starting a run",
    "draw": "a pipeline schedule as text or SVG",
}
EXAMPLES = """\
gangline parallel explain parallel=3d model=llama3-8b launch.processes=64 batch.global_size=512 precision=bf16
gangline parallel draw --schedule zb_h1 --stages 4 --microbatches 8
"""
OVERRIDES = "overrides as for `train`, or a run directory"


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `gangline parallel`."""
    return run_verb("parallel", VERBS, {"explain": _explain, "draw": _draw}, argv, EXAMPLES)


def _explain(argv: Sequence[str]) -> int:
    from gangline_parallel_megatron_style.explain.explained import explain_case
    from gangline_parallel_megatron_style.explain.of_run import make_case
    from gangline_parallel_megatron_style.explain.page import format_page, format_traced
    from gangline_parallel_megatron_style.layout.fits import find_untraceable

    flags = Flags(
        "parallel explain",
        "Print the traffic, memory and idle time of a layout. With a run directory: for the nodes of the run's newest\n"
        "start, at their network addresses.",
    )
    flags.add_argument("words", nargs="*", metavar="OVERRIDE", help=OVERRIDES)
    flags.add_number("--gpu-memory", "80", "memory of a GPU in GB (80)", default=80.0)
    flags.add_argument(
        "--trace",
        action="store_true",
        help="also run the real operators of the rank with most memory on the meta device, and report its peak memory",
    )
    options = flags.read(argv)
    run, nodes = _load_run(options.words)
    case = make_case(run)
    if nodes is not None:  # the layout comes from the run's options, the links from its nodes
        case = replace(case, config=replace(case.config, topology=nodes.build_topology(case.config.topology)))
    explained = explain_case(case, run.job.device != "cpu", run.precision.get_matmul_format())
    if options.trace and (problems := list(find_untraceable(case.tree, case.plan))):
        raise UserError.of(problems)
    print(format_page(case, explained, options.gpu_memory))
    if options.trace:
        from gangline_parallel_megatron_style.explain.trace import trace

        print(format_traced(explained, trace(run, case, explained.fullest)))
    return 0


def _load_run(words: Sequence[str]) -> tuple[Run, GivenNodes | None]:
    """Return the run that `train` overrides or a run directory describe, and the nodes of the directory's newest start.

    The nodes are None for overrides, and if the directory does not record them.
    """
    from gangline.config.compose import compose_one
    from gangline.run.directory import RunDirectory
    from gangline_basics.cluster.given import read_nodes

    if len(words) != 1 or not Path(words[0], "config.yaml").exists():
        return compose_one(words), None
    run, nodes = RunDirectory.open(words[0]).run(), read_nodes(words[0])
    if nodes is not None:
        run.launch = replace(run.launch, processes=nodes.processes)
    return run, nodes


def _draw(argv: Sequence[str]) -> int:
    from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES
    from gangline_parallel_megatron_style.pipeline.simulate import simulate

    flags = Flags(
        "parallel draw",
        "Draw a pipeline schedule: with the sizes of the flags; of a run, simulated; or of the last step that a run\n"
        "with parallel.record=true recorded.",
    )
    flags.add_argument("words", nargs="*", metavar="OVERRIDE", help=OVERRIDES)
    flags.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(SCHEDULES)} (1f1b)")
    flags.add_number("--stages", "4", "number of pipeline ranks (4)", integer=True)
    flags.add_number("--microbatches", "8", "number of microbatches (8)", integer=True)
    flags.add_number("--chunks", "2", "number of model chunks per rank", integer=True)
    flags.add_argument("--svg", metavar="FILE", help="write an SVG figure to FILE instead of printing text")
    flags.add_number("--width", "100", "width in characters (100), or in pixels with --svg (960)", integer=True)
    options = flags.read(argv)
    words = options.words
    if words and (options.schedule or options.stages or options.microbatches or options.chunks):
        raise UserError(
            "draw takes either a run or --schedule, --stages, --microbatches and --chunks, not both.",
            "Remove these flags, or remove the overrides or the run directory.",
        )
    if len(words) == 1 and Path(words[0], "metrics.jsonl").exists():
        timeline, caption = _read_recorded(Path(words[0]))
    else:
        schedule, times, caption = _build_run_schedule(words) if words else _build_schedule(options)
        timeline = simulate(schedule, times)
    if options.svg:
        write_figure(make_schedule_figure(timeline, caption, options.width or 960), options.svg)
        print(options.svg)
    else:
        print(as_text(timeline, caption, options.width or 100))
    return 0


def _build_schedule(asked: Namespace) -> tuple[Schedule, ActionTimes, Caption]:
    """Return the schedule that the flags ask for, with equal times of F, I and W, and the caption.

    Raises UserError for an unknown schedule or an invalid size.
    """
    from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES, make_schedule

    name = asked.schedule or "1f1b"
    if name not in SCHEDULES:
        raise UserError(
            f"--schedule {name} does not exist.", suggest_near(name, SCHEDULES), f"Choices: {', '.join(SCHEDULES)}."
        )
    try:
        schedule = make_schedule(
            name, ranks=asked.stages or 4, microbatches=asked.microbatches or 8, chunks=asked.chunks
        )
    except ValueError as error:
        raise UserError(f"{error}.") from error
    return schedule, UNIFORM, Caption(_format_title(name, schedule))


def _format_title(name: str, schedule: Schedule, whose: str = "") -> str:
    sizes = f"{schedule.ranks} ranks" + (f" of {schedule.chunks} chunks" if schedule.chunks > 1 else "")
    return f"Pipeline {name}{whose}: {sizes}, {schedule.microbatches} microbatches"


def _read_recorded(directory: Path) -> tuple[Timeline, Caption]:
    """Return the timeline, in ms, of the newest recorded step of a run. Raises UserError without a recorded step."""
    from gangline.cli import make_notes
    from gangline.record import read_records
    from gangline.run.directory import RunDirectory
    from gangline_parallel_megatron_style.cost.timing import find_schedule
    from gangline_parallel_megatron_style.explain.of_run import make_case
    from gangline_parallel_megatron_style.pipeline.record import find_latest, make_timeline

    newest_step = find_latest(read_records(directory / "metrics.jsonl", make_notes("gangline parallel draw")))
    case = make_case(RunDirectory.open(directory).run())
    schedule = find_schedule(case)
    if newest_step is None or schedule is None:
        raise UserError(
            f"{directory}/metrics.jsonl contains no recorded step of a pipeline.",
            "Only runs with a pipeline and parallel.record=true record the times of their actions.",
            f"train resume={directory} parallel.record=true",
        )
    step, spans = newest_step
    title = _format_title(case.config.schedule, schedule, f" of {directory.resolve().name}, step {step}")
    caption = Caption(title, "recorded on the first pipeline of the mesh", "ms")
    return make_timeline([1000 * at for at in spans], schedule), caption


def _build_run_schedule(words: Sequence[str]) -> tuple[Schedule, list[ActionTimes], Caption]:
    """Return the schedule of a run, the estimated times of its stages, and the caption. Raises UserError if pp is 1."""
    from gangline.config.compose import compose_one
    from gangline_parallel_megatron_style.cost.timing import estimate_action_times, find_schedule
    from gangline_parallel_megatron_style.explain.of_run import make_case

    case = make_case(compose_one(words))
    schedule = find_schedule(case)
    if schedule is None:
        raise UserError("this run has no pipeline to draw: parallel.pp is 1.", "", "parallel.pp=2, or more")
    most = max(time.F for time in estimate_action_times(case))
    caption = Caption(
        _format_title(case.config.schedule, schedule, f" of {' '.join(words)}"),
        "simulated, with times in proportion to the FLOPs of each stage",
        "forward passes of the slowest stage",
    )
    return (
        schedule,
        [ActionTimes(time.F / most, time.I / most, time.W / most) for time in estimate_action_times(case)],
        caption,
    )
