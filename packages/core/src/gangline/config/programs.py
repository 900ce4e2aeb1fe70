"""Refusal of programs and environment variables in configuration files: only the command line may set them. Torch-free.

Others may have written a recipe or the configuration of another run. The command line must repeat each program and
each reference to an environment variable in that file, because a run name, a path, a log or a URL would show
the value of the variable to others.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gangline.config.fields import Option
from gangline.config.ranges import runs_code
from gangline.config.serial import ENVIRONMENT
from gangline.config.values import override
from gangline.errors import Problem, UserError, escape_controls


def find_suspects(
    content: Mapping[str, Any], options: Mapping[str, Option], typed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return option -> value of a composed run, for values that run as a program or read the environment.

    typed: the run that the command line alone composes; options with an equal value in that run are left out.
    """
    own = dict(_iterate_values(typed or {}, options))
    values = {path: value for path, value in _iterate_values(content, options) if path not in own or own[path] != value}
    return {
        path: value
        for path, value in values.items()
        if (path in options and runs_code(options[path].stated, value)) or _reads_environment(value)
    }


def refuse_suspects(suspects: Mapping[str, Any], options: Mapping[str, Option], source: str, why: str) -> None:
    """Raise UserError that lists each option in `suspects` with the override to type.

    source: arguments that name the files. why: reason that these files are not trusted.
    """
    problems = []
    for path, value in suspects.items():
        runs = path in options and runs_code(options[path].stated, value)
        setting = override(path, value)
        what = "runs as a program" if runs else "reads an environment variable"
        empty = options[path].default if path in options else None
        again = f"To allow the setting, repeat it on the command line:  {shlex.quote(setting)}"
        problems.append(
            Problem(
                escape_controls(f"{source} sets {setting}, which {what}."),
                why,
                escape_controls(f"{again}\nTo remove the setting:  {shlex.quote(override(path, empty))}"),
            )
        )
    if problems:
        raise UserError.of(problems)


def explain_distrust(run_dir: str | Path) -> str:
    """Return why others may have written the config.yaml of a run directory; "" if only this user could write it."""
    for path in (Path(run_dir), Path(run_dir) / "config.yaml"):
        try:
            status = path.stat()
        except OSError as error:
            return f"The owner of {path} cannot be read: {error.strerror}."
        if status.st_uid != os.geteuid():
            return f"{path} belongs to another user."
        if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)):
            return f"Other users can write {path}. To remove this permission:  chmod go-w {shlex.quote(str(path))}"
    return ""


def _is_private(group: int) -> bool:
    """Return whether a group is this user's private group: it has the user's name and no other member."""
    try:
        user, group_entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return group_entry.gr_name == user and set(group_entry.gr_mem) <= {user}


def _iterate_values(
    content: Mapping[str, Any], options: Mapping[str, Option], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every option; a mapping yields each of its keys, unless the mapping runs as code."""
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and not (path in options and runs_code(options[path].stated)):
            yield from _iterate_values(value, options, f"{path}.")
        else:
            yield path, value


def _reads_environment(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_reads_environment, value.values()))
    if isinstance(value, list):
        return any(map(_reads_environment, value))
    return isinstance(value, str) and bool(ENVIRONMENT.search(value))
