"""Tasks of lm-eval, their evaluation on a model, and the results."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from typing import Any

import lm_eval
import numpy as np
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager

from gangline import UserError
from gangline_finetune.evaluate.config import locate_tasks
from gangline_finetune.evaluate.text_model import TextModel

Aggregate = Callable[[Any], Any]  # function from a metric's values per question to its result
LARGEST = 1e15  # largest number that a table shows with all digits


class Questions:
    """Tasks of lm-eval. tasks: names, and YAML files. shots, limit, chat: as in `gangline eval`.

    Raises UserError for an unknown task.
    """

    def __init__(self, tasks: Sequence[str], *, shots: int | None, limit: int | None, chat: bool) -> None:
        self.names, folders, theirs = locate_tasks(tasks)
        self.shots, self.limit, self.chat = shots, limit, chat
        # With include_defaults, lm-eval reads its 14,000 task files to find their names.
        self._manager = TaskManager(include_path=folders or None, include_defaults=theirs)
        if unknown := [name for name in self.names if name not in self._manager.all_tasks]:
            what = f"the lm-eval task {unknown[0]} is unknown."
            raise UserError(what, "lm-eval ls tasks  lists the tasks by name; a task may also be a YAML file.")

    @cached_property
    def _tasks(self) -> dict[str, Any]:
        """Tasks by name, loaded with their datasets, so that missing data is found early. Raises lm-eval's errors."""
        return self._manager.load(self.names)["tasks"]

    def find_likelihood_tasks(self) -> set[str]:
        """Return the names of multiple-choice tasks that need likelihoods, but not whether an answer is greedy.

        Raises lm-eval's errors if a task cannot be read.
        """
        return {
            name
            for name, task in self._tasks.items()
            if task.OUTPUT_TYPE == "multiple_choice" and "exact_match" not in task.aggregation()
        }

    def check(self, model: TextModel) -> None:
        """Raise UserError if a task needs answers that the model cannot generate. Call it before `ask_model`."""
        for task in self._tasks.values():
            if task.OUTPUT_TYPE == "generate_until":
                model.get_max_answer_tokens(task.config.generation_kwargs or {})

    def ask_model(self, model: Any) -> dict[str, Any]:
        """Evaluate a model, an instance of lm-eval's `LM`; return lm-eval's report.

        Does the same as lm-eval's `simple_evaluate`, but does not describe the machine: `simple_evaluate` runs pip and
        other commands for that, which would delay a run by seconds.
        """
        with _isolate_random():
            random.seed(DEFAULT_RANDOM_SEED)
            np.random.seed(DEFAULT_OTHER_SEED)
            torch.manual_seed(DEFAULT_OTHER_SEED)
            loaded = self._manager.load(self.names)
            for task in loaded["tasks"].values():
                own = task.get_config("num_fewshot")
                if own is None or (own and self.shots is not None):  # a task with 0 few-shot examples keeps 0
                    task.set_config(key="num_fewshot", value=self.shots or 0)
                task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
                task.aggregation = partial(_bound_aggregations, task.aggregation)
            return lm_eval.evaluate(
                lm=model,
                task_dict=loaded,
                limit=self.limit,
                apply_chat_template=self.chat,
                fewshot_as_multiturn=True,
                bootstrap_iters=0,
                log_samples=False,
            )


def _bound_aggregations(aggregation: Callable[[], dict[str, Aggregate]]) -> dict[str, Aggregate]:
    """Return metric -> aggregation of a task; on overflow of a float, these aggregations return inf.

    The word perplexity of a poorly trained model overflows, and lm-eval would lose the results of all tasks.
    """

    def bound(aggregate: Aggregate) -> Aggregate:
        @wraps(aggregate)
        def number(items: Any) -> Any:
            try:
                return aggregate(items)
            except OverflowError:
                return math.inf

        return number

    return {metric: bound(aggregate) for metric, aggregate in aggregation().items()}


def flatten_results(found: dict[str, Any]) -> dict[str, float]:
    """Return "TASK/METRIC" -> number, without standard errors; "TASK/METRIC/FILTER" for a filter other than "none"."""
    flat = {}
    for task, of_task in found["results"].items():
        for key, value in of_task.items():
            metric, _, suffix = key.partition(",")
            if isinstance(value, float | int) and not metric.endswith("_stderr") and metric != "sample_len":
                flat[f"{task}/{metric}" if suffix in ("", "none") else f"{task}/{metric}/{suffix}"] = float(value)
    return flat


def format_results(found: dict[str, Any]) -> dict[str, Any]:
    """Return the results for lm-eval's table, with text for numbers on which the table fails: huge or not finite."""

    def format_value(value: Any) -> Any:
        return f"~{value:.4g}" if isinstance(value, float) and not abs(value) < LARGEST else value

    results = {
        task: {key: format_value(value) for key, value in metrics.items()} for task, metrics in found["results"].items()
    }
    return {**found, "results": results}


@contextmanager
def _isolate_random() -> Iterator[None]:
    """Restore the state of the process's random generators after the block, since lm-eval seeds them."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
