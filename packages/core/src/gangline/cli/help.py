"""The page of `train --help`, made of the installed parts without composing a run. Imports neither torch nor Hydra."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from gangline.config.command_line import list_options, parse_choices
from gangline.config.defaults import get_default_choices
from gangline.config.fields import REQUIRED, Option
from gangline.config.recipes import find_recipes, read_summary
from gangline.config.sections import SECTIONS
from gangline.config.values import describe, spell
from gangline.plugin import catalogue
from gangline.plugin.discovery import find_version
from gangline.plugin.hooks import LISTS
from gangline.plugin.registry import OFF, installed

_WIDTH = 118
_USAGE = """\
usage: train [group=part ...] [option=value ...]
       train recipe=NAME ...            a complete run by name, with the overrides that follow
       train from=RUN_DIR ...           a new run with the configuration of an earlier run
       train from=RUN_DIR weights=RUN_DIR ...
                                        a new run that also starts from its weights and optimizer state
       train resume=RUN_DIR ...         continue a run in its directory
       train -m group=part,part ...     a run for every combination, one after the other

Chooses the parts of a run, checks the run, writes its directory (runs/<date>-<time>-<name>) and trains."""

_FLAGS = """\
Flags
  -h, --help                    show this help; for the options of a part:  train optimizer=adamw --help
  --cfg job                     print the configuration and exit
  -m, --multirun                start one run for each combination of values
  --completion bash|zsh|fish    print a completion script
  --version"""

_EXAMPLES = """\
Examples
  train                                                  the default run: a small model on Python's own source
  train run.steps=1000 optimizer.learning_rate=1e-3
  train parallel=ddp launch.processes=2                  the same run on two processes
  train 'data.path=texts/*.txt' model=gpt2-124m          your own text, a larger model
  train 'track=[console,jsonl]' run.name=quiet           lists take brackets
  train -m optimizer=adamw,muon                          two runs, to compare the optimizers
  train resume=runs/20260101-120000-run run.steps=2000   continue the run up to step 2000"""


def render_help(words: Sequence[str] = ()) -> str:
    """Return the help page, with options of the parts that `words` choose. Raises UserError for a missing part."""
    choices = parse_choices(words)
    for group, names in choices.items():
        for name in names:
            if name != OFF:
                installed().find(group, name)
    blocks = [_USAGE, _format_groups()]
    options = list_options(words).options.values()
    for group in choices:
        own = [option for option in options if option.path.startswith(group.replace("/", ".") + ".")]
        blocks.append(f"Options of {group}={','.join(choices[group])}\n" + (_format_options(own) or "  none"))
    if not choices:
        sections = [option for option in options if option.path.partition(".")[0] in SECTIONS]
        blocks.append("Options of every run  (for a part:  train optimizer=adamw --help)\n" + _format_options(sections))
        blocks += [_format_recipes(), _FLAGS, _EXAMPLES]
    return "\n\n".join(block for block in blocks if block)


def _format_groups() -> str:
    plugins, usual_choices = installed(), get_default_choices()
    width = max(len(group) for group in plugins.list_groups())
    lines = ["Groups  (* is the default; to list what each part does:  gangline plugins)"]
    for group in plugins.list_groups():
        default = usual_choices.get(group, OFF)
        usual = default if isinstance(default, list) else [default]
        marked = [f"{name}*" if name in usual else name for name in plugins.find_choices(group)]
        absent = [name for name in catalogue.list_names(group) if name not in plugins.get_offers(group)]
        absent = [name for name in absent if not find_version(catalogue.find_supplier(group, name) or "")]
        if absent:
            marked.append(f"(not installed: {', '.join(absent)})")
        body = " ".join(marked) or "(none installed)"
        label = f"{group}=[...]" if group in LISTS else f"{group}="
        head, indent = f"  {label:{width + 8}}", " " * (width + 10)
        lines.append(textwrap.fill(body, _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False))
    return "\n".join(lines)


def _format_options(options: Iterable[Option]) -> str:
    rows = [
        (
            f"{option.path}={'<required>' if option.default == REQUIRED else spell(option.default)}",
            option.help or _format_choices(option.hint),
        )
        for option in options
    ]
    width = min(44, max((len(setting) for setting, _ in rows), default=0))
    lines = []
    for setting, comment in rows:
        start = f"  {setting:{width}}  "
        lines.append(
            textwrap.fill(comment, _WIDTH, initial_indent=start, subsequent_indent=" " * (width + 4)).rstrip() or start
        )
    return "\n".join(lines)


def _format_choices(hint: Any) -> str:
    """Return the values of an enum type as text, "" for any other type."""
    return describe(hint) if isinstance(hint, type) and issubclass(hint, Enum) else ""


def _format_recipes() -> str:
    """Return all recipes with their summaries; of a folder with more than twelve recipes, the names alone."""
    recipes = find_recipes()
    counts = Counter(path.parent for path in recipes.values())
    few = {name: path for name, path in recipes.items() if counts[path.parent] <= 12}
    lines = [f"  {name:{max(map(len, few))}}  {read_summary(path)}".rstrip() for name, path in few.items()]
    many = textwrap.wrap(" ".join(sorted(recipes.keys() - few)), _WIDTH - 2, break_on_hyphens=False)
    return "\n".join(["Recipes", *lines, *(f"  {line}" for line in many)])
