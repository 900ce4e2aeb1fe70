"""Commands with several verbs, such as `gangline data prepare`: their help page and the call of a verb."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from keyword import iskeyword

from gangline.config.suggest import suggest_near
from gangline.errors import UserError

HELP = ("-h", "--help", "help")
Run = Callable[[Sequence[str]], int]


def run_verb(
    command: str, verbs: Mapping[str, str], runs: Mapping[str, Run] | str, argv: Sequence[str], more: str = ""
) -> int:
    """Run the verb that the arguments begin with and return its exit code; print the page of all verbs for --help.

    verbs: verb -> one line of help. runs: verb -> function, or the name of a package that has a module per verb with a
    function `run` (`burn_in` for the verb burn-in, `import_` for import), imported when called. more: a paragraph below
    the verbs. Raises UserError for an unknown verb.
    """
    if not argv or argv[0] in HELP:
        print(_render_page(command, verbs, more))
        return 0
    verb, *rest = argv
    if verb not in verbs:
        raise UserError(
            f"there is no gangline {command} {verb}.", suggest_near(verb, verbs), f"Choices: {', '.join(verbs)}."
        )
    if isinstance(runs, str):
        module = verb.replace("-", "_") + "_" * iskeyword(verb)
        return int(import_module(f"{runs}.{module}").run(rest))
    return runs[verb](rest)


def _render_page(command: str, verbs: Mapping[str, str], more: str) -> str:
    width = max(map(len, verbs))
    lines = [f"  {verb:{width}}  {text}" for verb, text in verbs.items()]
    below = [*([more] if more else []), f"For the options of a verb:  gangline {command} VERB --help"]
    return "\n".join([f"usage: gangline {command} VERB ...", "", *lines, "", *below])
