"""Functions are verbs: no function is named by a participle, a preposition, a pronoun or an adverb.

In the packages of `NAMED_BY_VERBS`, the first word of each function is a known verb, and parameters, fields and
properties have nouns as names. Each public class has its own name.
"""

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
after_step after_validation after_save on_error collective
""")  # methods of callbacks and checks that core calls
NAMES = words("""
apart computed hidden installed like of whole
""")  # of constructors, and of what has one name in the field or everywhere in the code
NAMED_BY_VERBS = words("basics core testkit")
KNOWN = words("""
accumulate add address adopt advance agree allocate announce answer append apply as ask assemble assert assign
attach attend back backward batch be become begin bind bound branch broadcast build call cap capture carry catch
change check choose chunk claim clear clip close collect commit compare compile complete compose compute configure
conform connect construct continue convert coordinate copy count create cut damage decide decode defer delete
dequantise derive descend describe detach detect die discard discover divert draw drop dump edit emit encode end
enter escape estimate evaluate exchange exit expand expect explain export extend extract fall feed fill find finish
fit flatten flip flush fold forbid forget fork format forward frame free from gather generate get give go group hand
handle has hash hide hold identify ignore import index initialise initialize install intersect introduce is iterate
join judge keep kill launch lay lead leave lend link list listen load locate lock log look lose main make map mark
mask match materialise may mean measure meet mend merge mix monitor move multiply name normalise normalize note
notify number observe open order orthogonalise outlive override pack parse pass place plan poll predict preload
prepare print put quantise quote raise rank read readinto recall receive recompute record recover redact reduce
refresh refuse reify release remeasure remember remove rename render renew replace report require resize resolve
respell respond restore resume retry return rewrite roll rotate run sample save say scale score search see seem
select send serve set settle share shift shorten show shutdown simulate size skip slice sort spell split spread
stack stamp start state stay step stop store suggest sum summarise swap sweep sync take tell test thin tie to touch
train transform translate truncate try turn uncap ungroup unlock unpack unpickle unwrap update use validate view
wait waive walk warm watch widen work wrap write writelines
""")  # verbs
ACCESSORS = words("""
barrier colwise error handleError hidden index init installed like linear local names next_rendezvous num_nodes_waiting
of parameters rank readable reducer_override rowwise shards size storage_meta whole
""")  # names of torch, MPI and the standard library, and values that a key or nothing selects
NOT_VALUES = words("""
asked given mine said seen told who whose
""")
HOOKS = ("gangline_", "pytest_", "test_", "do_")  # names that a framework calls


def is_verb(name: str) -> bool:
    """Return whether a function may have the name."""
    name = name.strip("_")
    first = name.partition("_")[0]
    if name in EVENTS or name in NAMES or name.startswith(COLLECTIVES):
        return True
    return first not in NOT_VERBS and (not first.endswith("ed") or first in VERBS_IN_ED)


def starts_with_verb(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether the first word is a known verb; a function that returns a bool may have it in the third person."""
    name = function.name.strip("_")
    first = name.partition("_")[0]
    if name in EVENTS | ACCESSORS or name.startswith((*COLLECTIVES, *HOOKS)) or first in KNOWN:
        return True
    answers = function.returns is not None and ast.unparse(function.returns) == "bool"
    return answers and bool(
        {first.removesuffix("s"), first.removesuffix("es"), f"{first.removesuffix('ies')}y"} & KNOWN
    )


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
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not (node.name.startswith("__") or is_verb(node.name) or is_value(node))
    ]


def list_nouns(files: Iterable[Path]) -> list[str]:
    """Return the functions whose first word is not a known verb, as "file:line name"."""
    return [
        f"{path}:{node.lineno} {node.name}"
        for path in sorted(files)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not (node.name.startswith("__") or starts_with_verb(node) or is_value(node))
    ]


def list_unclear_values(files: Iterable[Path]) -> list[str]:
    """Return the parameters of public functions, the fields and the properties whose name is no noun."""
    found = []
    for path in sorted(files):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[tuple[str, str]] = []
            if isinstance(node, ast.ClassDef):
                fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
                names = [(ast.unparse(item.target), ast.unparse(item.annotation)) for item in fields]
            elif isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__init__"):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = [(one.arg, ast.unparse(one.annotation) if one.annotation else "") for one in arguments]
                if any("property" in ast.unparse(mark) for mark in node.decorator_list):
                    names.append((node.name, ast.unparse(node.returns) if node.returns else ""))
            for name, kind in names:
                if name.strip("_") in NOT_VALUES and not kind.startswith("bool"):
                    found.append(f"{path}:{node.lineno} {node.name}: {name}")
    return found


@pytest.mark.parametrize("package", sorted(NAMED_BY_VERBS))
def test_functions_begin_with_a_known_verb(package: str) -> None:
    assert list_nouns((ROOT / "packages" / package / "src").rglob("*.py")) == [], "rename them, or add a verb to KNOWN"


def test_a_noun_as_name_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def rows(): ...\ndef read_rows(): ...\ndef holds(id) -> bool: ...\ndef holds_all(id) -> list: ...\n"
        "class Model:\n    @property\n    def layout(self): ...\n    def parameters(self): ...\n"
        "    def layout_of(self): ...\n    def _size(self): ...\n"
    )
    names = [line.split()[-1] for line in list_nouns(tmp_path.glob("*.py"))]
    assert names == ["rows", "holds_all", "layout_of"]


@pytest.mark.parametrize("package", sorted(NAMED_BY_VERBS))
def test_parameters_fields_and_properties_are_nouns(package: str) -> None:
    assert list_unclear_values((ROOT / "packages" / package / "src").rglob("*.py")) == []


def test_a_participle_as_value_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def read(told: str, asked: bool, kept_names): ...\ndef _read(told): ...\n"
        "class Rank:\n    given: int\n    said: bool\n    @property\n    def seen(self) -> int: ...\n"
    )
    values = [line.split(": ")[-1] for line in list_unclear_values(tmp_path.glob("*.py"))]
    assert sorted(values) == ["given", "seen", "told"]


def test_public_classes_have_one_name_in_all_packages() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        if "examples" in path.parts:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert {name: lines for name, lines in places.items() if len(lines) > 1} == {}


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
