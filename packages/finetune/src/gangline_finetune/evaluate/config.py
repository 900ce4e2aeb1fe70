"""Options of `callback=eval`, and parsing of task names. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from gangline import Problem, UserError
from gangline.config import CallbackConfig, NonNegativeInt, PositiveInt, RunsCode

if TYPE_CHECKING:
    from gangline.config import Run

SUFFIXES = (".yaml", ".yml")  # suffixes of files that describe a task


def _has_only_names(tasks: Any) -> bool:
    """Return whether all tasks are names. A YAML file can run code: lm-eval imports the modules in it."""
    return not any(str(task).endswith(SUFFIXES) for task in tasks)


@dataclass
class EvalConfig(CallbackConfig):
    """Options of `callback=eval`: lm-eval tasks every n steps on the run's ranks, as `gangline eval` evaluates them.

    The results `eval/TASK/METRIC` are in the step's record, which every tracker gets.
    """

    file_options: ClassVar[tuple[str, ...]] = ("files",)

    every: PositiveInt = 100  # interval of evaluations in steps
    tasks: Annotated[list[str], RunsCode(data=_has_only_names)] = field(default_factory=list)  # names of lm-eval tasks
    files: Annotated[list[str], RunsCode()] = field(default_factory=list)  # YAML files of lm-eval tasks, one per file
    shots: NonNegativeInt | None = None  # number of few-shot examples per question; null: the task's default
    limit: PositiveInt | None = None  # maximum number of questions per task; null: no limit
    batch: PositiveInt = 8  # evaluation batch size in texts per data-parallel rank
    chat: bool = False  # questions rendered by the chat template of the run's data

    def check(self, run: Run) -> list[Problem]:
        if not self.tasks and not self.files:
            return [
                Problem(
                    "callback=eval has no tasks.", "", "callback.eval.tasks=[NAME] or callback.eval.files=[FILE.yaml]"
                )
            ]
        try:
            check_installed("callback=eval")
            locate_tasks(self.files)
        except UserError as error:
            return [error.to_problem()]
        return []


def check_installed(command: str = "gangline eval") -> None:
    """Raise UserError if lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise UserError(
            f"{command} requires lm-eval, which is not installed.", "", "pip install 'gangline-finetune[eval]'"
        )


def locate_tasks(tasks: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Return (task names, folders of the YAML files, whether any task is given by name, so built into lm-eval).

    tasks: names, and YAML files with one task each. Raises UserError for a file that cannot be read or has no task.
    """
    names, folders, theirs = [], [], False
    for task in tasks:
        path = Path(task)
        if not task.endswith(SUFFIXES):
            names.append(task)
            theirs = True
            continue
        try:
            match = re.search(r"^task:\s*[\"']?([\w.-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        except OSError as error:
            raise UserError(f"{task} cannot be read.", error.strerror or str(error)) from error
        if match is None:
            raise UserError(f"{task} does not define an lm-eval task.", "The file lacks a line `task: NAME`.")
        names.append(match[1])
        folders.append(str(path.resolve().parent))
    return names, list(dict.fromkeys(folders)), theirs
