"""The command `train`: compose a run, check it, write its directory, launch it.

Every rank imports this module again (it is the main module of the process that forks the ranks), so it imports neither
torch nor Hydra at import time; `train --help` never imports them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gangline.cli import run_guarded
from gangline.errors import UserError
from gangline.launch.signals import ignore_early_requests, restore_handlers

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline.run.directory import RunDirectory


@dataclass
class CommandLine:
    """A parsed command line: flags of `train` itself, and overrides that describe the run."""

    help: bool = False
    version: bool = False
    multirun: bool = False
    cfg: bool = False
    completion: str | None = None
    complete: list[str] | None = None
    resume: str | None = None
    words: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `train` and return its exit code. This is its entry point."""
    with ignore_early_requests():
        return run_guarded("train", _train, sys.argv[1:] if argv is None else argv)


def read(argv: Sequence[str]) -> CommandLine:
    """Parse a command line. Raises UserError for an unknown flag, and for text that the locale cannot decode."""
    line, rest, refused = CommandLine(), list(argv), list[UserError]()
    for word in rest:
        if any("\udc80" <= sign <= "\udcff" for sign in word):
            raise UserError(
                f"the argument {word!r} is not text in this locale's encoding ({sys.getfilesystemencoding()}).",
                "train writes its arguments to config.yaml, which can store only text.",
                "export LC_ALL=C.UTF-8   or, if the argument is the name of a file, rename the file",
            )
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            line.help = True
        elif word == "--version":
            line.version = True
        elif word in ("-m", "--multirun"):
            line.multirun = True
        elif word in ("-c", "--cfg", "--cfg=job"):
            line.cfg = True
            if word != "--cfg=job" and rest[:1] == ["job"]:
                rest.pop(0)
        elif word.startswith("--completion"):
            _, sign, shell = word.partition("=")
            line.completion = shell if sign else rest.pop(0) if rest else ""
        elif word == "--complete":
            line.complete, rest = rest, []
        elif word.startswith("-"):
            refused.append(_refuse_flag(word, rest))
        elif word.startswith("resume="):
            path = word.removeprefix("resume=")
            quoted = len(path) > 1 and path[0] == path[-1] and path[0] in "'\""  # quotes, as around option values
            line.resume = path[1:-1] if quoted else path
        else:
            line.words.append(word)
    if refused:
        raise UserError.of(error.to_problem() for error in refused)
    return line


def _refuse_flag(word: str, rest: Sequence[str]) -> UserError:
    from gangline.config.command_line import list_options
    from gangline.config.sections import SECTIONS
    from gangline.config.suggest import answer, find_options, suggest_near
    from gangline.plugin.registry import installed

    flags = ("--help", "--cfg job", "--multirun", "-m", "--completion bash|zsh|fish", "--version")
    name, sign, value = word.lstrip("-").partition("=")
    if not sign and rest and "=" not in rest[0] and not rest[0].startswith("--"):  # --lr 1e-3
        value = rest[0]
    known_options = list_options([])
    paths = find_options(name, known_options.options, installed().get_synonyms())
    if advice := answer(name, value, installed().get_words()):  # only the option of the advice may take the value
        paths = [path for path in paths if advice == f"Did you mean {path}?"]
    if paths and value:
        hints = [f"Set options without dashes:  {'  or  '.join(f'{path}={value}' for path in paths)}"]
    else:
        hints = known_options.suggest(name, value or "true")  # --bf16
        grouped = sign and name.partition(".")[0].partition("/")[0] in (*SECTIONS, *installed().list_groups())
        hints = hints or [f"Set options without dashes:  {name}={value}" if grouped else suggest_near(word, flags)]
    return UserError(f"there is no flag {word}.", *hints, f"Flags: {', '.join(flags)}.")


def _train(argv: Sequence[str]) -> int:
    line = read(argv)
    if line.complete is not None:
        from gangline.cli.complete import list_candidates

        print("\n".join(list_candidates(line.complete)))
        return 0
    if line.completion is not None:
        from gangline.cli.complete import read_script

        print(read_script(line.completion))
        return 0
    if line.version:
        from gangline.plugin.discovery import find_version

        print(find_version("gangline-core"))
        return 0
    if line.help:
        from gangline.cli.help import render_help

        print(render_help(line.words))
        return 0
    if line.cfg:
        return _show(line)
    from gangline.launch.output import outlive_readers

    with outlive_readers():
        return _run(line, argv)


def _show(line: CommandLine) -> int:
    """Print the run as config.yaml would store it (`--cfg job`); return 0."""
    import yaml

    from gangline.config.compose import compose, compose_one
    from gangline.config.serial import to_dict

    if line.resume is not None:
        runs = [_resume(line)[1]]
    else:
        runs = compose(line.words) if line.multirun else [compose_one(line.words)]
    files = (yaml.safe_dump(to_dict(run), sort_keys=False, allow_unicode=True, width=120) for run in runs)
    print("---\n".join(files), end="")
    return 0


def _make_rank(agent: str) -> Callable[[Callable[[], RunDirectory]], NoReturn]:
    """Return the function that trains as a rank of an agent's job, from capability `rank` of the default launcher."""
    from gangline.config.defaults import build_default_part
    from gangline.plugin import registry

    launcher = build_default_part("launch")
    train = registry.load_capability(launcher, "rank")
    if train is None:
        name = registry.installed().find_part(launcher).part.name
        raise UserError(f"launch={name} does not support ranks started by {agent}; start train without {agent}.")
    ranks: Callable[[Callable[[], RunDirectory]], NoReturn] = train
    return ranks


def _run(line: CommandLine, argv: Sequence[str]) -> int:
    from gangline.launch.detected import detect
    from gangline.plugin.registry import installed

    installed().refuse_clashes()  # before the launcher is looked up
    job = detect()
    if job is not None:
        restore_handlers()
        if line.multirun:
            raise UserError(f"-m starts several runs, but a job of {job.agent} is one run.", "Leave out -m.")
        return _make_rank(job.agent)(lambda: _prepare(line, argv, job.key))
    from gangline.launch import requeue
    from gangline.launch.base import get_preparation

    ready = get_preparation()
    if ready and _seems_local(line):
        ready.start()  # loads torch while the run is composed
    try:
        if line.multirun:
            if line.resume is not None:
                raise UserError("resume= continues one run; -m starts several runs.", "Leave out -m, or type from=.")
            from gangline.cli.multirun import run_all

            return run_all(line.words)
        key, restarts = requeue.identify_job()
        directory = requeue.find_earlier(key, restarts) or _prepare(line, argv, key)
        if directory.run().launch.shares:
            directory.share()
        else:
            directory.lock()
        requeue.remember(key, directory.path)
    except BaseException:  # a user's mistake, or a request to stop
        if ready:
            ready.stop()
        raise
    from gangline import api

    if not find_spec("torch"):
        install = "pip install 'torch>=2.11,<2.14'"
        raise UserError(f"torch is not installed in {sys.prefix}.", f"{install} && train resume={directory.path}")
    return api.launch(directory)


def _seems_local(line: CommandLine) -> bool:
    """Return whether ranks will probably run here, by the overrides alone; a recipe or resume may choose a launcher."""
    from gangline.config.schema import LaunchConfig
    from gangline.plugin.registry import installed

    launchers = [word.removeprefix("launch=") for word in line.words if word.startswith("launch=")]
    offer = installed().get_offers("launch").get(launchers[-1]) if launchers else None
    return offer is None or not issubclass(offer.part.config, LaunchConfig) or offer.part.config.here


def _prepare(line: CommandLine, argv: Sequence[str], job: str | None = None) -> RunDirectory:
    """Compose and check the run, write its directory and return it, locked unless nodes share a resumed run."""
    from gangline import api
    from gangline.config.compose import compose_one

    command = ["train", *argv]
    if line.resume is None:
        return api.prepare(compose_one(line.words), command, job)
    from gangline.config.check import check
    from gangline.config.resume import refuse_ended

    directory, run, changes = _resume(line)
    run.job.dir = str(directory.path)
    check(run)
    refuse_ended(run, directory.path)
    if not run.launch.shares:
        directory.lock()
    for note in directory.list_changed_parts():
        print(f"train: note: {note}", file=sys.stderr)
    (directory.go_on if run.launch.shares else directory.rewrite)(run, command, changes)
    return directory


def _resume(line: CommandLine) -> tuple[RunDirectory, Run, dict]:
    from gangline.config.resume import continue_run
    from gangline.run.directory import RunDirectory

    others = [word for word in line.words if word.startswith(("from=", "recipe=", "weights="))]
    if others:
        raise UserError(f"resume= continues a run, but {others[0]} starts a new run.", "Leave out one of the two.")
    directory = RunDirectory.open(Path(line.resume or ""))
    run, changes = continue_run(str(directory.path), directory.read_content(), line.words)
    return directory, run, changes


if __name__ == "__main__":
    sys.exit(main())
