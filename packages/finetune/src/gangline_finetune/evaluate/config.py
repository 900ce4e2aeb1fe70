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
    """Return whether all tasks are names. A file is a program: lm-eval imports the Python that it names."""
    return not any(str(task).endswith(SUFFIXES) for task in tasks)


@dataclass
class EvalConfig(CallbackConfig):
    """Tasks of lm-eval every n steps, on the run's own ranks: the evaluation of `gangline eval` during the run.

    The step's record, and so every tracker, gets `eval/TASK/METRIC`.
    """

    file_options: ClassVar[tuple[str, ...]] = ("files",)

    every: PositiveInt = 100  # interval of evaluations in steps
    tasks: Annotated[list[str], RunsCode(data=_has_only_names)] = field(default_factory=list)  # names of lm-eval tasks
    files: Annotated[list[str], RunsCode()] = field(default_factory=list)  # YAML files that describe one task each
    shots: NonNegativeInt | None = None  # few-shot examples before each question; null: the task's own number
    limit: PositiveInt | None = None  # maximum number of questions per task; null: all
    batch: PositiveInt = 8  # batch size in texts, on each data rank
    chat: bool = False  # chat template of the run's data, applied to questions

    def check(self, run: Run) -> list[Problem]:
        if not self.tasks and not self.files:
            return [
                Problem("callback=eval has nothing to ask.", "", "callback.eval.tasks=[NAME], or .files=[FILE.yaml]")
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
        raise UserError(f"{command} needs lm-eval.", "", "pip install 'gangline-finetune[eval]'")


def locate_tasks(tasks: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Return (names of tasks, folders of their files, whether a name without a file may be a task of lm-eval itself).

    tasks: names, and YAML files that describe one task each. Raises UserError for a file that is missing or describes
    none.
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
            raise UserError(f"{task} is no task of lm-eval.", "It has no line `task: NAME`.")
        names.append(match[1])
        folders.append(str(path.resolve().parent))
    return names, list(dict.fromkeys(folders)), theirs
