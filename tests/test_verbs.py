"""Functions are verbs: no function is named by a participle, a preposition, a pronoun or an adverb."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


CHECKED = words("""
planner dataloader track launch health testkit ckpt-zarr finetune moe parallel-megatron-style basics models core
""")
PARTICIPLES = words("""
begun bent born bought broken brought built caught chosen dealt done drawn driven fallen fed felt forgotten fought
found frozen gave given glued gone grew grown heard held hidden kept knew known laid learnt led left lent lost made
meant met paid said saw seen sent shown sold sought spent spoken stood struck stuck sunk swept taken taught thought
thrown told took torn understood undone unmet unread unseen unwritten withdrawn won worn written
""")
VERBS_IN_ED = words("""
embed exceed feed heed need proceed seed shed speed succeed weed
""")
PREPOSITIONS = words("""
about above across after against along among around at before behind below beside besides between beyond by for in
inside into like near of off on out outside over per since than through toward towards under until up upon via with
within without
""")  # not from, to and as: `from_json` converts
PRONOUNS = words("""
all another any anybody anyone anything both each either every everybody everyone everything few he hers his how it
its less many me mine more most neither nobody none nothing one only other others our ours own same several she some
somebody someone something such that their theirs them these they this those us we what whatever which who whoever
whom whose you yours
""")
ADVERBS = words("""
afresh again ahead alike alone already always apart aside away early elsewhere even everywhere far here late maybe
never no not now once openly patiently there together twice when where whole why
""")
NOT_VERBS = PARTICIPLES | PREPOSITIONS | PRONOUNS | ADVERBS
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
EVENTS = words("""
before_run before_step before_clip before_update before_validation before_save
after_step after_validation after_save on_error
""")  # methods of callbacks and checks that core calls
NAMES = words("""
apart computed hidden installed like of whole
""")  # of constructors, and of what has one name in the field or everywhere in the code
NOT_YET = ("gangline_ckpt_zarr/save/", "gangline_testkit/checkpointer", "gangline_testkit/toys/files.py")  # files


def is_verb(name: str) -> bool:
    """Return whether a function may have the name."""
    name = name.strip("_")
    first = name.partition("_")[0]
    if name in EVENTS or name in NAMES or name.startswith(COLLECTIVES):
        return True
    return first not in NOT_VERBS and (not first.endswith("ed") or first in VERBS_IN_ED)


def is_value(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether callers read a function as a value (a property, a fixture) or as a constructor (`Mesh.of`)."""
    marks = [ast.unparse(mark) for mark in function.decorator_list]
    if any("property" in mark or "fixture" in mark or mark.endswith(".setter") for mark in marks):
        return True
    return "classmethod" in marks and (function.name == "of" or function.name.startswith("of_"))


def misnamed(files: Iterable[Path]) -> list[str]:
    """Return the functions whose name is not a verb, as "file:line name"."""
    return [
        f"{path}:{node.lineno} {node.name}"
        for path in sorted(files)
        if not any(name in path.as_posix() for name in NOT_YET)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not (node.name.startswith("__") or is_verb(node.name) or is_value(node))
    ]


@pytest.mark.parametrize("package", sorted(CHECKED))
def test_functions_are_named_by_verbs(package: str) -> None:
    assert misnamed((ROOT / "packages" / package / "src").rglob("*.py")) == []


def test_a_name_without_a_verb_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def named(): ...\ndef feed(): ...\ndef cut(): ...\n"
        "class Mesh:\n"
        "    @classmethod\n    def of(cls): ...\n"
        "    @property\n    def held(self): ...\n"
        "    def _by_rank(self):\n        def each(): ...\n"
        "    def all_reduce(self): ...\n    def before_step(self): ...\n    def from_json(self): ...\n"
    )
    assert [line.split()[-1] for line in misnamed(tmp_path.glob("*.py"))] == ["named", "_by_rank", "each"]
