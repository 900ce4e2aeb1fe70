"""Checks of a run before a process starts or torch is imported; one message lists all problems. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

from gangline.config.defaults import get_default_choices
from gangline.config.fields import REQUIRED, get_defaults, read_comments, resolve_hints_with_ranges
from gangline.config.ramp import find_ramp_problems
from gangline.config.ranges import explain_wrong, list_choices, list_divisors
from gangline.config.schema import PartConfig, Run
from gangline.config.start import find_start_problems
from gangline.config.suggest import suggest_near
from gangline.config.validation import PATH as VALIDATION_SETS, check_part, check_sets, read_sets
from gangline.config.values import spell
from gangline.errors import Problem, UserError
from gangline.launch.detected import detect
from gangline.launch.devices import count_gpus
from gangline.mesh import DATA_AXES, Mesh
from gangline.model.compose import compose_model
from gangline.model.pretrained import Pretrained, find_pretrained
from gangline.plugin.hooks import LISTS
from gangline.plugin.registry import installed

SHORT, LONG = 1, 1 << 30  # sequence lengths in tokens, below and above every limit that a part may set
DEVICES = r"cpu|cuda(:\d+)?"  # torch names of the supported devices


def check(run: Run) -> None:
    """Raise UserError with all problems of the run or, if there are none, with the launcher's reasons to refuse it."""
    if problems := find_problems(run) or run.launch.find_refusals(run):
        raise UserError.of(problems)


def find_problems(run: Run) -> list[Problem]:
    """Return the problems of the first failing stage: option ranges; parts; then model edits, layout and batch."""
    problems = find_meaningless(run) or _catch_refusal(lambda: _open_reader(run))
    if not problems:
        problems += [*_check_device(run), *_check_unread(run), *_check_needs(run)]
        for place, config in _iterate_configs(run):
            problems += check_part(place, config, run)
        problems += [*_check_variables(run), *_check_gradients(run)]
        problems += [*find_start_problems(run), *_check_pretrained(run), *check_sets(run)]
    if not problems:
        problems += _catch_refusal(lambda: compose_model(run))
        problems += find_layout_problems(run)
    return problems


def _check_pretrained(run: Run) -> list[Problem]:
    """Return the problems of the model's directory of pretrained weights; [] for a model without one."""
    reader = _open_reader(run)
    return reader.find_problems(run) if reader and not run.launch.defers_check(run.model) else []


def _open_reader(run: Run) -> Pretrained | None:
    """Return the reader of the model's pretrained weights; None without weights. Raises UserError if no reader fits."""
    return None if run.model.get_weights_directory() is None else find_pretrained(run.model)


def find_part_problems(run: Run, parts: Collection[PartConfig]) -> list[Problem]:
    """Return the problems that the checks of `parts` report both at the shortest and at the longest sequence length."""

    def find_at(length: int) -> list[Problem]:
        measured = replace(run, batch=replace(run.batch, sequence_length=length))
        own = ((place, config) for place, config in run.iterate_parts() if config in parts)
        return [problem for place, config in _iterate_opened(own) for problem in check_part(place, config, measured)]

    problems = find_at(SHORT)
    return [problem for problem in problems if problem in find_at(LONG)] if problems else []


def _check_variables(run: Run) -> Iterator[Problem]:
    """Yield a problem for each environment variable that two parts set differently and the user has not set."""
    settings: dict[str, tuple[str, str]] = {}
    for place, config in run.iterate_parts():
        for name, value in config.get_environment(run).items():
            other, theirs = settings.setdefault(name, (place, value))
            if theirs != value and name not in os.environ:
                yield Problem(
                    f"{other} needs {name}={theirs} in the environment of the ranks, and {place} needs {name}={value}.",
                    "A rank can have only one value of an environment variable.",
                    f"Leave out one of the two parts, or set the variable yourself:  {name}={value} train ...",
                )


def count_ranks(run: Run) -> int:
    """Return the number of ranks of the torchrun or Slurm job of this process; without a job, the launcher's count."""
    job = detect()
    return job.world if job else run.launch.count_ranks(run)


def find_meaningless(run: Run) -> list[Problem]:
    """Return a problem for each option value outside the range in its field's type (`gangline.config.ranges`)."""
    places = [*run.iterate_sections(), *run.iterate_parts()]
    places += [(f"{VALIDATION_SETS}.{name}", config) for name, config in read_sets(run)[0].items()]
    return [problem for place, config in places for problem in _find_meaningless(config, place)]


def _find_meaningless(config: Any, path: str, defaults: Any = None) -> Iterator[Problem]:
    """Yield a problem for each value that its field does not allow.

    defaults: default values of `config` as a field of another config; they override the defaults of its class.
    """
    cls: Any = type(config)
    own, defaults = get_defaults(cls), defaults if isinstance(defaults, dict) else {}
    for name in own:
        default = defaults.get(name, own[name])
        value, hint = getattr(config, name), resolve_hints_with_ranges(cls)[name]
        if is_dataclass(value):
            yield from _find_meaningless(value, f"{path}.{name}", default)
        elif complaint := explain_wrong(hint, value):
            usual = "" if default == REQUIRED else f"The default:  {path}.{name}={spell(default)}"
            comment = f"Meaning: {read_comments(cls)[name]}" if name in read_comments(cls) else ""
            yield Problem(
                f"{path}.{name}={spell(value)} {complaint}.",
                suggest_near(str(value), list_choices(hint)) or comment,
                usual,
            )


def _check_device(run: Run) -> Iterator[Problem]:
    """Yield a problem if `run.device` is not a torch device, or if the ranks run here and there is no such GPU."""
    device = run.job.device
    if device is None:
        return
    name, _, number = device.partition(":")
    if not run.launch.here and re.fullmatch(DEVICES, device):
        return
    take = (
        "Type run.device=cuda, or run.device=null to use the available GPUs."
        if count_gpus()
        else "Type run.device=cpu or run.device=null: this machine has no GPU."
    )
    if not re.fullmatch(DEVICES, device):
        guess = "The name of a GPU is cuda." if name in ("gpu", "nvidia") else suggest_near(name, ["cpu", "cuda"])
        yield Problem(f"run.device={device} must be cpu, cuda or cuda:N.", guess, take)
    elif name == "cuda" and not count_gpus():
        yield Problem(f"run.device={device}: this machine has no GPU.", "", take)
    elif number and int(number) >= count_gpus():
        yield Problem(f"run.device={device}: this machine has {count_gpus()} GPUs, numbered from 0.", "", take)


def _check_unread(run: Run) -> Iterator[Problem]:
    """Yield a problem for each choice in a plugin's own group that no part of this run reads (`Part.reads`)."""
    reading = {group for _, config in _iterate_configs(run) for group in installed().find_part(config).part.reads}
    for group in sorted(set(run.extra) - reading):
        name = installed().find_part(run.extra[group]).part.name
        readers = ", ".join(installed().list_readers(group))
        if readers:
            why, fix = f"Only {readers} uses {group}, and is not chosen.", f"Choose {readers}, or {group}=off."
        else:
            why, fix = f"Only gangline commands use the group {group}, not runs.", f"Leave out {group}={name}."
        yield Problem(f"{group}={name} has no effect in this run.", why, fix)


def _check_needs(run: Run) -> Iterator[Problem]:
    """Yield a problem for each part that a part of the run requires and the run lacks (`Part.needs`)."""
    choices: dict[str, list[str]] = {}
    for place, config in run.iterate_parts():
        choices.setdefault(place.partition(".")[0], []).append(installed().find_part(config).part.name)
    for place, config in _iterate_configs(run):
        part, own = installed().find_part(config).part, re.sub(r"\.[^/]*", "", place)
        for need in part.needs:
            group, _, name = need.partition("=")
            there = choices.get(group, [])
            if name not in there:
                absent = _catch_refusal(partial(installed().find, group, name))
                word = f"{group}=[{','.join([*there, name])}]" if group in LISTS else need
                yield Problem(
                    f"{own}={part.name} needs {need}.",
                    f"The two parts implement one method, and this run has {group}={', '.join(there) or 'off'}.",
                    "\n".join(f"{problem.what}\n{problem.why}" for problem in absent) or f"To choose both:  {word}",
                )


def _check_gradients(run: Run) -> Iterator[Problem]:
    """Yield a problem for a gradient reduction that the strategy ignores, or whose state would store inf values."""
    parts = (run.gradients, run.parallel, run.precision)
    reduction, strategy, precision = (installed().find_part(config).part.name for config in parts)
    if run.precision.finds_scale and run.gradients.count_state(LONG, 2, scatters=False):
        yield Problem(
            f"gradients={reduction} does not work with precision={precision}.",
            "The reduction stores state between steps, and an overflow under the loss scale would put inf into it.",
            "Choose precision=bf16, or a reduction that stores no state between steps.",
        )
    if run.gradients.plain or run.parallel.reduces:
        return
    strategies = [offer.part for offer in installed().get_offers("parallel").values()]
    others = [part.name for part in strategies if getattr(part.config, "reduces", False)]
    yield Problem(
        f"gradients={reduction} has no effect with parallel={strategy}.",
        "This strategy has no data-parallel ranks, or sums their gradients by its own method.",
        f"Choose gradients={get_default_choices()['gradients']}, or another strategy: "
        f"{', '.join(others) or 'none is installed'}.",
    )


def _iterate_configs(run: Run) -> Iterator[tuple[str, PartConfig]]:
    """Yield (path, configuration) of every part: "callback.ema", and "callback.ema/part" for a part inside it."""
    return _iterate_opened(run.iterate_parts())


def _iterate_opened(parts: Iterable[tuple[str, PartConfig]]) -> Iterator[tuple[str, PartConfig]]:
    for place, config in parts:
        yield place, config
        for name in installed().find_part(config).part.opens:
            yield f"{place}/{name}", getattr(config, name)


def find_layout_problems(run: Run) -> list[Problem]:
    """Return problems of the layout: the product of axis sizes must be the number of ranks; batch sizes must divide."""
    world = count_ranks(run)
    name = installed().find_part(run.parallel).part.name
    job = detect()
    if job and run.launch.processes not in (None, world):
        what = f"launch.processes={run.launch.processes}, but {job.agent} started {world} processes."
        return [Problem(what, "", f"Leave out launch.processes: {job.agent} sets the number of ranks.")]
    try:
        axes = run.parallel.size_axes(world)
        mesh = Mesh.of(axes)
    except UserError as error:
        return [error.to_problem()]
    if mesh.world != world:
        product = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "1"
        what = f"the axes of parallel={name} give {product} = {mesh.world} ranks, but this run has {world} processes."
        return [Problem(what, "", f"Type launch.processes={mesh.world}, or choose axis sizes with product {world}.")]
    return _check_batch(run, mesh.size(*DATA_AXES)) + find_ramp_problems(run, mesh.size(*DATA_AXES))


def _check_batch(run: Run, width: int) -> list[Problem]:
    """Return a problem unless global_size = micro_size x accumulation x `width` (data-parallel ranks) in integers."""
    size, micro_size = run.batch.global_size, run.batch.micro_size
    if size % width:
        near = sorted({max(width, size // width * width), -(-size // width) * width})
        return [
            Problem(
                f"batch.global_size={size} is not divisible by {width} data-parallel ranks.",
                "Every rank gets an equal share of the global batch; a different global batch size changes the run.",
                f"Nearest: {' or '.join(f'batch.global_size={value}' for value in near)}; "
                f"or a data-parallel width among {list_divisors(size)}.",
            )
        ]
    share = size // width
    if micro_size is not None and share % micro_size:
        each = f"batch.global_size={size} / {width} data-parallel ranks" if width > 1 else f"batch.global_size={size}"
        return [
            Problem(
                f"batch.micro_size={micro_size} does not divide {share} ({each}).",
                "global_size = micro_size x accumulation x data-parallel width.",
                f"Choose batch.micro_size among {list_divisors(share)}; null: set by the parallel strategy.",
            )
        ]
    return []


def _catch_refusal(attempt: Callable[[], object]) -> list[Problem]:
    try:
        attempt()
    except UserError as error:
        return [error.to_problem()]
    return []
