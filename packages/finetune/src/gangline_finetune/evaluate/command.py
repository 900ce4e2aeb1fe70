"""Command `gangline eval RUN_DIR --tasks NAME|FILE ...`: evaluation of a run's model by lm-eval."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gangline import UserError
from gangline.record import to_plain
from gangline_finetune.evaluate.config import check_installed


def _parse_positive(text: str) -> int:
    return _parse_integer(text, 1)


def _parse_not_negative(text: str) -> int:
    return _parse_integer(text, 0)


def _parse_integer(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, not {text}")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Run `gangline eval`: print lm-eval's table. Raises UserError without a checkpoint, and for unknown tasks."""
    parser = argparse.ArgumentParser(prog="gangline eval", description="Evaluate the model of a run on lm-eval tasks.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run directory")
    parser.add_argument(
        "--tasks", nargs="+", required=True, metavar="TASK", help="names or YAML files of lm-eval tasks"
    )
    parser.add_argument(
        "--checkpoint", metavar="ID", help="checkpoint to evaluate, such as step-00000100 (default: the newest)"
    )
    parser.add_argument(
        "--shots",
        type=_parse_not_negative,
        metavar="N",
        help="number of few-shot examples per question (default: the task's)",
    )
    parser.add_argument("--limit", type=_parse_positive, metavar="N", help="maximum number of questions per task")
    parser.add_argument(
        "--batch", type=_parse_positive, default=8, metavar="N", help="batch size in texts (default: %(default)s)"
    )
    parser.add_argument("--chat", action="store_true", help="apply the tokenizer's chat template to the questions")
    parser.add_argument("--out", metavar="FILE", help="JSON file to create with all results of lm-eval")
    options = parser.parse_args(list(argv))
    check_installed()
    from gangline_finetune.evaluate.run_model import load_lm
    from gangline_finetune.evaluate.tasks import Questions, format_results

    if options.out is not None:
        _check_out(Path(options.out))
    questions = Questions(options.tasks, shots=options.shots, limit=options.limit, chat=options.chat)
    model = load_lm(options.run_dir, checkpoint=options.checkpoint, batch=options.batch)
    if model.max_length > (row_length := model.sampler.run.batch.sequence_length):
        why = f"as lm-eval uses for the exported model; the run trained on rows of {row_length} tokens"
        print(f"gangline eval: note: the context length is {model.max_length} tokens, {why}.", file=sys.stderr)
    try:
        questions.check(model)
    except OSError as error:  # no network, or an unknown dataset
        why = "lm-eval downloads datasets from the Hugging Face hub and caches them: run once with network access."
        raise UserError(f"the questions of the tasks cannot be read: {error}.", why) from error
    report = questions.ask_model(model)
    from lm_eval.utils import make_table

    print(f"{options.run_dir}\n{make_table(format_results(report))}")
    if options.out is not None:
        text = json.dumps(to_plain(report["results"]), indent=2, default=str, allow_nan=False)
        Path(options.out).write_text(f"{text}\n", encoding="utf-8")
    return 0


def _check_out(path: Path) -> None:
    """Raise UserError if the results cannot be written to `path`; called before the evaluation."""
    if path.exists():
        raise UserError(
            f"--out: {path} already exists.", "gangline eval does not overwrite files.", "Name another file."
        )
    if not path.parent.is_dir():
        raise UserError(
            f"--out: {path} cannot be written.", f"{path.parent} is not a directory.", f"mkdir -p {path.parent}"
        )
    if not os.access(path.parent, os.W_OK):
        raise UserError(
            f"--out: {path} cannot be written.", f"The directory {path.parent} is not writable.", "Name another file."
        )
