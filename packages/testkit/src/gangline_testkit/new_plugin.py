"""`gangline new-plugin NAME`: write a plugin that installs, is listed, runs and passes its conformance suite.

The code of a new plugin is the example of its kind, renamed, so that documentation, tests and new plugins share one
text. The hook `gangline_kinds` provides all kinds, including those of core.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gangline.config.suggest import suggest_near
from gangline.errors import UserError
from gangline.plugin.hooks import BY_NAME, GROUPS, LISTS, Hook, Kind
from gangline.plugin.parts import Part
from gangline.plugin.registry import installed, load
from gangline_testkit.kinds import KINDS

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MODULE = re.compile(r"# gangline_(\w+)(?:\.py|/__init__\.py): ")

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "gangline-{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = [{needs}]  # below the next major version of the contract

[project.entry-points."gangline.v1"]
{name} = "{module}"
"""

TEST = """\
class Test{title}({suite}):
    choice = "{choice}"
    can = set()  # claims of the part; a warning names each further claim that would pass
"""

# Further lines of the suite class, by kind.
MORE = {
    "checkpoint": """
    def get_local_settings(self, directory):
        return (f"checkpoint.folder={directory}/elsewhere",)
""",
    "gradients": """
    tolerance = 0.2  # maximum relative error of the mean of 40 sums
""",
}

README = """\
# gangline-{name}

    pip install -e . gangline-testkit
    {listed:38} # lists {choice}
    {use}
    pytest                                 # the conformance suite
    gangline conform gangline-{name}

The comment after each option is its help text. The documentation of gangline describes the contract of the plugin under
the hook `{hook}`.
"""


def main(argv: Sequence[str]) -> int:
    """Write ./gangline-NAME. Raises UserError if the name is taken or invalid, or if the directory exists."""
    parser = argparse.ArgumentParser(
        prog="gangline new-plugin", description="Write a new plugin package with code and tests."
    )
    parser.add_argument("name", nargs="?", help="name that users type; NAME=mine writes the distribution gangline-mine")
    parser.add_argument("--kind", default="tracker", help="kind of plugin (default: tracker); --kinds lists all kinds")
    parser.add_argument("--kinds", action="store_true", help="list all kinds of plugins, and exit")
    options = parser.parse_args(argv)
    if options.kinds:
        kinds = {kind.name: kind for kind in (*KINDS, *installed().get_kinds().values())}
        width = max(map(len, kinds))
        print("\n".join(f"{name:{width}}  {kind.summary}" for name, kind in kinds.items()))
        return 0
    if options.name is None:
        raise UserError("the name of the new plugin is missing.", "", "gangline new-plugin mine --kind tracker")
    folder = write(options.name.removeprefix("gangline-"), options.kind, Path.cwd())
    print(f"wrote {folder.name}/\n")
    print(f"  cd {folder.name}\n  pip install -e . gangline-testkit\n  gangline plugins\n  pytest")
    return 0


def write(name: str, kind: str, where: Path) -> Path:
    """Write the plugin `gangline-<name>` into a new directory in `where`, and return the new directory."""
    plugin_kind, folder = _find_kind(kind), where / f"gangline-{name}"
    _refuse(name, plugin_kind, folder)
    for path, text in make_files(name, kind).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder


def make_files(name: str, kind: str) -> dict[str, str]:
    """Return {path: content} of every file of a new plugin."""
    plugin_kind, module = _find_kind(kind), f"gangline_{name.replace('-', '_')}"
    code = read_example(plugin_kind)
    entry = next(iter(code.values()))
    old = parse_entry_name(entry)
    choices = list_choices(name, plugin_kind)
    choice, words = choices[0], " ".join(map(_quote_choice, choices))
    group, _, part = choice.partition("=")
    outer = "".join(f"{word} " for word in _choose_openers(group))
    supplier = plugin_kind.example.partition(".")[0].replace("_", "-")
    suppliers = {"gangline-core", *({supplier} - {"gangline", "gangline-testkit"})}
    needs = sorted(f'"{supplier}>=0.1,<1"' for supplier in suppliers)
    names = {"name": name, "module": module, "title": _make_title(name), "choice": choice, "needs": ", ".join(needs)}
    hook = find_hooks(entry)[0][0].name
    use = f"train {outer}{words}" if part else choice
    list_command = "gangline plugins" if part else "gangline --help"
    files = {
        "pyproject.toml": PYPROJECT.format(**names),
        "README.md": README.format(**names, use=use, hook=hook, listed=list_command),
        **{path.replace("MODULE", module): rename_example(text, old, name, plugin_kind) for path, text in code.items()},
        "tests/test_conformance.py": _make_tests(name, plugin_kind),
    }
    return files


def _quote_choice(choice: str) -> str:
    """Return a choice as a user types it, with brackets around a list."""
    group, _, part = choice.partition("=")
    return f"'{group}=[{'console,' if group == 'track' else ''}{part}]'" if group in LISTS else choice


def _make_tests(name: str, kind: Kind) -> str:
    """Return the text of the test file: the suite of the kind for the first part, and a suite for each other part."""
    choices = list_choices(name, kind)
    others = {other.group: other.suite for other in reversed(installed().get_kinds().values())}
    suites = [kind.suite, *(others[choice.partition("=")[0]] for choice in choices[1:])]
    imports: dict[str, list[str]] = {}
    for suite in suites:
        module, _, cls = suite.partition(":")
        imports.setdefault(module, []).append(cls)
    lines = [f"from {module} import {', '.join(sorted(names))}\n" for module, names in imports.items()]
    for number, (choice, suite) in enumerate(zip(choices, suites, strict=True), 1):
        title = _make_title(name) + (str(number) if number > 1 else "")
        lines += ["\n\n", TEST.format(title=title, suite=suite.partition(":")[2], choice=choice)]
    return "".join(lines) + MORE.get(kind.name, "")


def read_example(kind: Kind) -> dict[str, str]:
    """Return {path: text} of the example's files, entry module first. In paths, MODULE stands for the module name.

    Raises LookupError if the kind names an example that does not exist.
    """
    place, _, name = kind.example.partition(":")
    if name:
        example = load(kind.example)
        text = example if isinstance(example, str) else (inspect.getdoc(example) or "").partition("::\n\n")[2]
        return {"MODULE.py": textwrap.dedent(text).strip() + "\n"}
    spec = find_spec(place)
    if spec is None or spec.origin is None:
        raise LookupError(f"the kind {kind.name} names the example module {place}, which cannot be found")
    entry = Path(spec.origin)
    if spec.submodule_search_locations is None:
        return {"MODULE.py": entry.read_text(encoding="utf-8")}
    others = sorted(path for path in entry.parent.glob("*.py") if path != entry)
    return {f"MODULE/{path.name}": path.read_text(encoding="utf-8") for path in (entry, *others)}


def parse_entry_name(code: str) -> str:
    """Return the name of an example, from the module name in its first line. Raises LookupError if it is missing."""
    match = _MODULE.match(code)
    if match is None:
        raise LookupError(
            f"an example must begin with a comment like '# gangline_mine.py: ...', and begins with {code[:40]!r}"
        )
    return match[1]


def list_choices(name: str, kind: Kind) -> list[str]:
    """Return the arguments that choose the parts of a new plugin, such as "track=mine"; for a command, the command."""
    entry = next(iter(read_example(kind).values()))
    code = rename_example(entry, parse_entry_name(entry), name, kind)
    if kind.group:
        return [f"{kind.group}={name}"]
    return list_parts(code) if _opens_a_group(kind) else [f"gangline {name}"]


def find_hooks(code: str) -> list[tuple[Hook, ast.FunctionDef]]:
    """Return (hook, function) of each hook that an entry module implements, in order."""
    functions = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    return [(BY_NAME[function.name], function) for function in functions if function.name in BY_NAME]


def list_parts(code: str) -> list[str]:
    """Return "group=name" of each part that an entry module offers with a constant name and group."""
    parts = []
    for hook, function in find_hooks(code):
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "Part":
                words = [word for word in call.keywords if isinstance(word.value, ast.Constant)]
                values = {word.arg: ast.literal_eval(word.value) for word in words}
                parts.append(f"{values.get('group', hook.group)}={values['name']}")
    return parts


def rename_example(code: str, example: str, name: str, kind: Kind) -> str:
    """Return the example's code with another name for its module, its classes, and its part or group."""
    own = name.replace("-", "_")
    code = code.replace(f"gangline_{example}", f"gangline_{own}")
    code = re.sub(rf"\b{example.title()}(?=[A-Z]|\b)", _make_title(name), code)
    return re.sub(rf"\b{example}\b", own if _opens_a_group(kind) else name, code)


def _opens_a_group(kind: Kind) -> bool:
    """Return whether plugins of a kind open a group. A group needs a Python name; parts and commands may have "-"."""
    return not kind.group and find_hooks(next(iter(read_example(kind).values())))[0][0].yields is Part


def _choose_openers(group: str) -> list[str]:
    """Return the choices of the parts that open a nested group, outermost first."""
    outer, nested, field = group.rpartition("/")
    if not nested:
        return []
    openers = [name for name, offer in sorted(installed().get_offers(outer).items()) if field in offer.part.opens]
    return [*_choose_openers(outer), f"{outer}={'on' if 'on' in openers else openers[0]}"]


def _make_title(name: str) -> str:
    return "".join(word.title() for word in name.split("-"))


def _find_kind(name: str) -> Kind:
    kinds = installed().get_kinds()
    if name not in kinds:
        raise UserError(
            f"--kind {name}: no such kind of plugin.", suggest_near(name, kinds), f"Kinds: {', '.join(kinds)}."
        )
    return kinds[name]


def _refuse(name: str, kind: Kind, folder: Path) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is not a valid plugin name.",
            "A name has lower-case letters, digits and '-' between words, and starts with a letter.",
        )
    if folder.exists():
        raise UserError(f"the directory {folder.name} already exists.", "Choose another name, or move the directory.")
    group, _, part = list_choices(name, kind)[0].partition("=")
    if not kind.group and group in GROUPS:
        raise UserError(f"{group} is a group of gangline.", "Choose another name.")
    if not part and name in installed().get_commands():
        raise UserError(f"the command gangline {name} already exists.", "Choose another name.")
    if part in installed().get_offers(group):
        offer = installed().get_offers(group)[part]
        raise UserError(f"{group}={part} already exists, supplied by {offer.distribution}.", "Choose another name.")
