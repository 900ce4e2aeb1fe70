"""Shell completion for `train`: groups, parts, options, their values, run directories. No torch, no Hydra."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from gangline.config.command_line import list_options
from gangline.config.recipes import find_recipes
from gangline.config.values import list_alternatives
from gangline.errors import UserError
from gangline.plugin.hooks import LISTS
from gangline.plugin.registry import installed

FLAGS = ("--help", "--cfg", "--multirun", "--completion", "--version")
WORDS = {bool: ("true", "false"), types.NoneType: ("null",)}  # type -> values to complete, besides `Option.choices`

# bash splits words at "=": take the word from the line, and remove the text up to its last "=" from each answer.
_BASH = r"""
_gangline_train() {
    local line="${COMP_LINE:0:COMP_POINT}" word prefix=""
    word="${line##*[[:space:]]}"
    local IFS=$'\n'
    COMPREPLY=($(IFS=$' \t\n'; train --complete ${line#*[[:space:]]} ${word:+""} "${word:-}" 2>/dev/null))
    [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && prefix="${word%"${word##*=}"}"
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -F _gangline_train train
""".strip()

_ZSH = r"""
#compdef train
_gangline_train() {
    local -a found
    found=("${(@f)$(train --complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -Q -S '' -- "${(@)found:#}"
}
compdef _gangline_train train
""".strip()

_FISH = r"""
complete -c train -f -a '(train --complete (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
""".strip()

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_HOW = {
    "bash": "# In ~/.bashrc:  source <(train --completion bash)",
    "zsh": "# In ~/.zshrc, after compinit:  source <(train --completion zsh)",
    "fish": "# Save as ~/.config/fish/completions/train.fish",
}


def read_script(shell: str) -> str:
    """Return the completion script of a shell, to be run once. Raises UserError for an unknown shell."""
    if shell not in _SCRIPTS:
        raise UserError(f"train --completion does not support the shell {shell!r}.", f"Shells: {', '.join(_SCRIPTS)}.")
    return f"{_HOW[shell]}\n{_SCRIPTS[shell]}"


def list_candidates(words: Sequence[str]) -> list[str]:
    """Return the completions of the last of `words`, given the words before it."""
    *before, current = words or [""]
    if current.startswith("-"):
        return [flag for flag in FLAGS if flag.startswith(current)]
    key, sign, value = current.partition("=")
    if not sign:
        return sorted({word for word in _iterate_keys(before, current) if word.startswith(current)})
    return [f"{key}={word}" for word in _list_values(before, key, value) if word.startswith(value)]


def _iterate_keys(before: Sequence[str], current: str) -> Iterator[str]:
    """Yield groups, keys such as "recipe=", and the path of every option up to the first dot after `current`."""
    yield from (f"{group}=" for group in installed().list_groups())
    yield from ("recipe=", "from=", "weights=", "resume=")
    for path in list_options(before).options:
        cut = path.find(".", len(current))
        yield f"{path}=" if cut < 0 else path[: cut + 1]


def _list_values(before: Sequence[str], key: str, value: str) -> list[str]:
    if key in ("from", "weights", "resume"):
        return _run_dirs(value)
    if key == "recipe":
        return list(find_recipes())
    group = key.lstrip("+")
    if group in installed().list_groups():
        prefix, comma, _ = value.rpartition(",")
        start = f"{prefix}{comma}" if comma else "[" if value.startswith("[") else ""
        names = installed().find_choices(group)
        return [f"{start}{name}" for name in names if name not in prefix.strip("[").split(",") or group not in LISTS]
    option = list_options(before).options.get(group)
    if option is None:
        return []
    words = [word for member in list_alternatives(option.hint) for word in WORDS.get(member, ())]
    return list(dict.fromkeys([*option.choices, *words]))


def _run_dirs(value: str) -> list[str]:
    """Return the run directories in the folder of the path `value`, and its other subfolders with "/" at their end."""
    folder = Path(value) if value.endswith("/") else Path(value).parent
    inside = sorted(folder.glob("*/")) if folder.is_dir() else []
    return [str(path) if (path / "config.yaml").exists() else f"{path}/" for path in inside]
