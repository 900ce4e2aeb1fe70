"""`gangline parallel explain | draw`: look at a layout or a schedule before paying for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gangline import UserError
from gangline.cli.verbs import verb_of
from gangline.config.suggest import near
from gangline.explain.timeline import ActionTimes
from gangline.figure import write_figure
from gangline_parallel_megatron_style.pipeline.action_times import UNIFORM
from gangline_parallel_megatron_style.pipeline.actions import Schedule
from gangline_parallel_megatron_style.pipeline.draw import Caption, as_text, schedule_figure
from gangline_parallel_megatron_style.pipeline.simulate import Timeline

if TYPE_CHECKING:
    from gangline.cluster.given import GivenNodes
    from gangline.config import Run

USAGE = """\
usage: gangline parallel explain [--gpu-memory GB] [--trace] [WORDS OF train ...]
       gangline parallel explain [--gpu-memory GB] [--trace] RUN_DIR
       gangline parallel draw [--schedule NAME --stages N --microbatches N [--chunks N]] [--svg FILE] [--width N]
       gangline parallel draw [--svg FILE] [--width N] WORDS OF train ...
       gangline parallel draw [--svg FILE] [--width N] RUN_DIR

  explain   what a layout sends, keeps and waits for; nothing is started, and no GPU is needed. With --trace the rank
            that needs most memory is run through its real operators, without their memory, and measured. Of a run
            directory: on the nodes that its newest start was given, by their places in the network
  draw      a pipeline's schedule as a picture: of the numbers given, of a run as it should be, or of the last step
            that a run with parallel.record=true has recorded

  gangline parallel explain parallel=3d model=llama3-8b launch.processes=64 batch.global_size=512 precision=bf16
  gangline parallel draw --schedule zb_h1 --stages 4 --microbatches 8"""

NUMBERS = {"stages", "microbatches", "chunks"}  # flags of `draw` that make a schedule


def main(argv: Sequence[str]) -> int:
    """The verb `gangline parallel`. Raises UserError for words that it does not know."""
    verbs = {"explain": _explain, "draw": _draw}
    asked = verb_of("parallel", verbs, argv, USAGE)
    if asked is None:
        return 0
    verb, rest = asked
    if {"-h", "--help"} & set(rest):
        print(USAGE)
        return 0
    return verbs[verb](rest)


def _explain(argv: Sequence[str]) -> int:
    from gangline_parallel_megatron_style.explain.explained import case_of, of_case
    from gangline_parallel_megatron_style.explain.page import text, traced
    from gangline_parallel_megatron_style.layout.fits import untraceable

    flags, words = flags_of([word for word in argv if word != "--trace"], ("gpu-memory",))
    gpu = number("gpu-memory", flags.get("gpu-memory", "80"))
    run, given = _asked(words)
    case = case_of(run)
    if given is not None:  # the layout is that of the run's options; its links are those of the nodes
        case = replace(case, config=replace(case.config, topology=given.topology(case.config.topology)))
    found = of_case(case, run.run.device != "cpu", run.precision.products())
    if "--trace" in argv and (problems := list(untraceable(case.tree, case.plan))):
        raise UserError.of(problems)
    print(text(case, found, gpu))
    if "--trace" in argv:
        from gangline_parallel_megatron_style.explain.trace import trace

        print(traced(found, trace(run, case, found.fullest)))
    return 0


def _asked(words: Sequence[str]) -> tuple[Run, GivenNodes | None]:
    """A run of `train`'s words; or one that lies in a directory, with the nodes that its newest start was given."""
    from gangline.cluster.given import given_nodes
    from gangline.config.compose import compose_one
    from gangline.run.directory import RunDirectory

    if len(words) != 1 or not Path(words[0], "config.yaml").exists():
        return compose_one(words), None
    run, given = RunDirectory.open(words[0]).run(), given_nodes(words[0])
    if given is not None:
        run.launch = replace(run.launch, processes=given.processes)
    return run, given


def _draw(argv: Sequence[str]) -> int:
    from gangline_parallel_megatron_style.pipeline.simulate import simulate

    flags, words = flags_of(argv, ("schedule", *sorted(NUMBERS), "svg", "width"))
    if words and flags.keys() & {"schedule", *NUMBERS}:
        raise UserError("a schedule is drawn of the numbers given, or of a run.", "Leave out the flags, or the words.")
    if len(words) == 1 and Path(words[0], "metrics.jsonl").exists():
        timeline, caption = _recorded(Path(words[0]))
    else:
        schedule, times, caption = _of_run(words) if words else _of_flags(flags)
        timeline = simulate(schedule, times)
    width = whole("width", flags["width"]) if "width" in flags else None
    if "svg" in flags:
        write_figure(schedule_figure(timeline, caption, width or 960), flags["svg"])
        print(flags["svg"])
    else:
        print(as_text(timeline, caption, width or 100))
    return 0


def _of_flags(flags: dict[str, str]) -> tuple[Schedule, ActionTimes, Caption]:
    """The schedule that the flags name; its stages cost the same, a backward pass twice a forward pass."""
    from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES, make_schedule

    name = flags.get("schedule", "1f1b")
    if name not in SCHEDULES:
        raise UserError(
            f"--schedule {name} does not exist.", near(name, SCHEDULES), f"Choices: {', '.join(SCHEDULES)}."
        )
    sizes = {"stages": 4, "microbatches": 8} | {flag: whole(flag, flags[flag]) for flag in flags.keys() & NUMBERS}
    try:
        made = make_schedule(
            name, ranks=sizes["stages"], microbatches=sizes["microbatches"], chunks=sizes.get("chunks")
        )
    except ValueError as error:
        raise UserError(f"{error}.") from error
    return made, UNIFORM, Caption(_title(name, made))


def _title(name: str, schedule: Schedule, whose: str = "") -> str:
    sizes = f"{schedule.ranks} ranks" + (f" of {schedule.chunks} chunks" if schedule.chunks > 1 else "")
    return f"Pipeline {name}{whose}: {sizes}, {schedule.microbatches} microbatches"


def _recorded(directory: Path) -> tuple[Timeline, Caption]:
    """What the newest recorded step of a run did, in milliseconds."""
    from gangline.cli import notes_by
    from gangline.record import read_records
    from gangline.run.directory import RunDirectory
    from gangline_parallel_megatron_style.cost.timing import schedule_of
    from gangline_parallel_megatron_style.explain.explained import case_of
    from gangline_parallel_megatron_style.pipeline.record import latest, timeline

    found = latest(read_records(directory / "metrics.jsonl", notes_by("gangline parallel draw")))
    case = case_of(RunDirectory.open(directory).run())
    schedule = schedule_of(case)
    if found is None or schedule is None:
        raise UserError(
            f"no step of {directory} was recorded.",
            "Times are kept where the run asks for it, in a pipeline.",
            f"train resume={directory} parallel.record=true",
        )
    step, spans = found
    title = _title(case.config.schedule, schedule, f" of {directory.resolve().name}, step {step}")
    caption = Caption(title, "recorded on the first pipeline of the mesh", "ms")
    return timeline([1000 * at for at in spans], schedule), caption


def _of_run(words: Sequence[str]) -> tuple[Schedule, list[ActionTimes], Caption]:
    """The schedule of a run, and what its stages compute."""
    from gangline.config.compose import compose_one
    from gangline_parallel_megatron_style.cost.timing import action_times, schedule_of
    from gangline_parallel_megatron_style.explain.explained import case_of

    case = case_of(compose_one(words))
    schedule = schedule_of(case)
    if schedule is None:
        raise UserError("this run has no pipeline: pp is 1.", "", "parallel.pp=2, or more")
    most = max(time.F for time in action_times(case))
    caption = Caption(
        _title(case.config.schedule, schedule, f" of {' '.join(words)}"),
        "simulated, by the products that each stage computes",
        "forward passes of the largest stage",
    )
    return schedule, [ActionTimes(time.F / most, time.I / most, time.W / most) for time in action_times(case)], caption


def flags_of(argv: Sequence[str], known: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Flags with a value, `--name value` or `--name=value`, and the other words. Raises UserError."""
    flags, words, rest = {}, [], list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        name, sign, value = word.removeprefix("--").partition("=")
        if name not in known:
            listed = ", ".join(f"--{flag}" for flag in known)
            raise UserError(f"there is no flag {word}.", near(name, known), f"Flags: {listed}.")
        if not sign and not rest:
            raise UserError(f"{word} needs a value.")
        flags[name] = value if sign else rest.pop(0)
    return flags, words


def number(name: str, value: str) -> float:
    """A positive number. Raises UserError."""
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if found <= 0:
        raise UserError(f"--{name} {value}: expected a number above 0.")
    return found


def whole(name: str, value: str) -> int:
    """A positive whole number. Raises UserError."""
    found = number(name, value)
    if found != int(found):
        raise UserError(f"--{name} {value}: expected a whole number.")
    return int(found)
