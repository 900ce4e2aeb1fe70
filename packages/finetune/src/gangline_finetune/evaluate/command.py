"""`gangline eval RUN_DIR --tasks NAME|FILE ...`: what lm-eval says of the model of a run."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gangline import UserError


def _positive(text: str) -> int:
    return _whole(text, 1)


def _not_negative(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of {least} or more")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Print lm-eval's table. Raises UserError for a run without a checkpoint and for tasks that there are not."""
    parser = argparse.ArgumentParser(prog="gangline eval", description="Evaluate the model of a run by lm-eval.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's directory")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help="names of lm-eval, or YAML files")
    parser.add_argument("--checkpoint", metavar="ID", help="such as step-00000100; by default the newest")
    parser.add_argument(
        "--shots", type=_not_negative, metavar="N", help="examples before each question; by default the task's"
    )
    parser.add_argument("--limit", type=_positive, metavar="N", help="of each task so many questions")
    parser.add_argument("--batch", type=_positive, default=8, metavar="N", help="texts at a time (%(default)s)")
    parser.add_argument("--chat", action="store_true", help="ask by the tokenizer's chat template")
    parser.add_argument("--out", metavar="FILE", help="write all that lm-eval says, as JSON")
    options = parser.parse_args(list(argv))
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise UserError("gangline eval needs lm-eval.", "", "pip install 'gangline-finetune[eval]'") from error
    from gangline_finetune.evaluate.run_model import lm_of

    if options.out is not None:
        _check_out(Path(options.out))
    tasks, folders = named(options.tasks)
    manager = TaskManager(include_path=folders or None)
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise UserError(f"lm-eval has no task {unknown[0]}.", "lm-eval ls tasks  lists them; a YAML file is one, too.")
    model = lm_of(options.run_dir, checkpoint=options.checkpoint, batch=options.batch)
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        num_fewshot=options.shots,
        limit=options.limit,
        apply_chat_template=options.chat,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    print(f"{options.run_dir}\n{make_table(found)}")
    if options.out is not None:
        Path(options.out).write_text(json.dumps(found["results"], indent=2, default=str) + "\n")
    return 0


def _check_out(path: Path) -> None:
    """Raises UserError where the numbers could not be written: it is said before they are computed."""
    if path.exists():
        raise UserError(f"{path} exists.", "Nothing is overwritten.", "Name another file.")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written.", f"{path.parent} is no directory.", f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path} cannot be written.", f"{path.parent} may not be written to.", "Name another file.")


def named(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """(names of tasks, folders with tasks beside lm-eval's own). tasks: names, and YAML files that describe one each.

    Raises UserError for a file that is not there or describes none.
    """
    names, folders = [], []
    for task in tasks:
        path = Path(task)
        if path.suffix not in (".yaml", ".yml"):
            names.append(task)
            continue
        try:
            found = re.search(r"^task:\s*[\"']?([\w.-]+)", path.read_text(), re.MULTILINE)
        except OSError as error:
            raise UserError(f"{task} cannot be read.", error.strerror or str(error)) from error
        if found is None:
            raise UserError(f"{task} is no task of lm-eval.", "It has no line `task: NAME`.")
        names.append(found[1])
        folders.append(str(path.resolve().parent))
    return names, list(dict.fromkeys(folders))
