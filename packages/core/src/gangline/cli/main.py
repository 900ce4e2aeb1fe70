"""`gangline <verb>`: all commands except training. Plugins, including core's own, offer the commands through a hook."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from gangline.cli import run_guarded
from gangline.config.suggest import suggest_near
from gangline.errors import BadCheckpoint, UserError
from gangline.plugin import catalogue
from gangline.plugin.registry import installed, load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `gangline` and return its exit code. This is its entry point."""
    words = sys.argv[1:] if argv is None else argv
    program = f"gangline {words[0]}" if words and words[0] in installed().get_commands() else "gangline"
    return run_guarded(program, _run_verb, words)


def _run_verb(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_print_help())
        return 0
    if words[0] == "--version":
        from gangline.plugin.discovery import find_version

        print(find_version("gangline-core"))
        return 0
    verb, *rest = words
    commands = installed().get_commands()
    if verb not in commands:
        installed().refuse_clashes()
        training = verb == "train" or "=" in verb
        own = " ".join(shlex.quote(word) for word in words[verb == "train" :]) or "--help"
        hint = f"To train:  train {own}" if training else suggest_near(verb, commands)
        hint = f"To continue a run:  train resume={(rest or ['RUN_DIR'])[0]}" if verb == "resume" else hint
        if supplier := catalogue.VERBS.get(verb):
            hint = f"gangline {verb} is supplied by {supplier}:  {catalogue.get(supplier)}"
        raise UserError(f"there is no verb {verb!r}.", hint, f"Verbs: {', '.join(sorted(commands))}.")
    try:
        return int(load(commands[verb].run)(rest) or 0)
    except ModuleNotFoundError as error:
        if not (lines := catalogue.explain_missing(error)):
            raise
        raise UserError(f"gangline {' '.join(words[:2])} needs {lines[0]}.", lines[1]) from error
    except BadCheckpoint as damage:
        why = "The files differ from the bytes that were saved. An earlier checkpoint of the run may be intact."
        raise UserError(f"{damage}.", why, "To use an earlier checkpoint:  --checkpoint ID") from damage


def _print_help() -> str:
    commands = sorted(installed().get_commands().values(), key=lambda command: command.name)
    width = max(len(command.name) for command in commands)
    lines = ["usage: gangline VERB ...", ""]
    lines += [f"  {command.name:{width}}  {command.summary}" for command in commands]
    return "\n".join([*lines, "", "To train, use the command train:  train --help"])


if __name__ == "__main__":
    sys.exit(main())
