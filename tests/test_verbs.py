"""Names in the code: functions begin with a known verb; parameters, fields and variables are nouns.

Each public class has its own name.
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


PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/src"))
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
EVENTS = words("""
before_run before_step before_clip before_update before_validation before_save
after_step after_validation after_save on_error collective
""")  # methods of callbacks and checks that core calls
KNOWN = words("""
abandon abort accumulate act add address admit adopt advance agree align allocate announce answer append apply as ask
assemble assert assign attach attend back backward balance batch be become begin bind bound branch break broadcast
build calibrate call cancel cap capture carry catch change check choose chunk claim clean clear clip close collect
combine commit compare compile complete compose compute configure conform connect construct continue convert convolve
coordinate copy count create cut damage decide decode defer delete deliver dequantise derive descend describe detach
detect diagnose die discard discover dispatch divert divide drain draw drop dump edit emit encode end enter escape
estimate evaluate exceed exchange exist exit expand expect explain export extend extract fail fall feed fetch fill
filter find finish fit flatten flip flush fold follow forbid forecast forget fork format forward frame free from
gather generate get give go group grow hand handle has hash hide hold identify ignore import index initialise
initialize inject install intern intersect introduce is isolate iterate join judge keep kill launch lay lead learn
leave lend link list listen load locate lock log look lose main make map mark mask match materialise may mean measure
meet fix merge mix monitor move multiply name normalise normalize note notify number observe open order orthogonalise
outlive overlap override pack pad parse partition pass pause pin place plan poll post predict prefetch preload prepare
print probe prune publish put quantise query quote raise rank read readinto rearrange recall receive recompute record
recover redact reduce refresh refuse reify release remeasure remember remove rename render renew replace report
require reshard resize resolve respell respond restart restore resubmit resume retry return rewrite roll rotate round
run sample save say scale score search see seem select send serve set settle share shift shorten show shutdown
simulate size skip slice sort spell spend split spread stack stage stamp start state stay step stop store strip submit
suggest sum summarise survey survive swap sweep sync synchronize take tell test thin tie to touch trace train
transform translate truncate try turn uncap ungroup unlock unpack unpickle unravel unscale unshard unwrap upcycle
update use validate verify view wait waive walk warm watch weigh widen withdraw work wrap write writelines
""")  # verbs
ACCESSORS = words("""
barrier chat_template colwise error handleError hidden index init installed like linear local loglikelihood
loglikelihood_rolling loglikelihood_tokens names next_rendezvous num_nodes_waiting of parameters process_request
process_request_thread rank readable reducer_override replicated rowwise shards size storage_meta tok_encode
""")  # names of torch, MPI, lm-eval and the standard library, and functions that return a constant or look up a key
NOT_VALUES = words("""
asked given mine said seen told who whose
""")
NOT_LOCALS = NOT_VALUES | words("""
found held kept known made named wanted
""")
HOOKS = ("gangline_", "pytest_", "test_", "do_")  # names that a framework calls


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


def list_unclear_locals(files: Iterable[Path]) -> list[str]:
    """Return the local variables that a participle names and that hold more than True or False."""
    lines = set()
    for path in sorted(files):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and is_condition(node.value):
                    continue
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                names = [getattr(node, "optional_vars", None), *targets]
                nodes = [one for top in names if top for one in ast.walk(top)]
                stored = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
                stored |= {node.name} if isinstance(node, ast.ExceptHandler) and node.name else set()
                lines |= {f"{path}:{function.lineno} {name}" for name in stored & NOT_LOCALS}
    return sorted(lines)


def is_condition(value: ast.expr) -> bool:
    """Return whether an expression is True or False by its form."""
    if isinstance(value, ast.BoolOp):
        return any(is_condition(one) for one in value.values)
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.Not)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("all", "any", "bool", "hasattr", "isinstance")
    return isinstance(value, ast.Compare) or ast.unparse(value) in ("True", "False")


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_begin_with_a_known_verb(package: str) -> None:
    assert list_nouns((ROOT / "packages" / package / "src").rglob("*.py")) == [], "rename them, or add a verb to KNOWN"


def test_function_named_by_noun_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def rows(): ...\ndef read_rows(): ...\ndef holds(id) -> bool: ...\ndef holds_all(id) -> list: ...\n"
        "class Model:\n    @property\n    def layout(self): ...\n    def parameters(self): ...\n"
        "    def layout_of(self): ...\n    def _size(self): ...\n"
    )
    names = [line.split()[-1] for line in list_nouns(tmp_path.glob("*.py"))]
    assert names == ["rows", "holds_all", "layout_of"]


@pytest.mark.parametrize("package", PACKAGES)
def test_parameters_fields_and_properties_are_nouns(package: str) -> None:
    assert list_unclear_values((ROOT / "packages" / package / "src").rglob("*.py")) == []


def test_value_named_by_participle_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def read(told: str, asked: bool, kept_names): ...\ndef _read(told): ...\n"
        "class Rank:\n    given: int\n    said: bool\n    @property\n    def seen(self) -> int: ...\n"
    )
    values = [line.split(": ")[-1] for line in list_unclear_values(tmp_path.glob("*.py"))]
    assert sorted(values) == ["given", "seen", "told"]


@pytest.mark.parametrize("package", PACKAGES)
def test_local_variables_are_nouns(package: str) -> None:
    assert list_unclear_locals((ROOT / "packages" / package / "src").rglob("*.py")) == []


def test_local_variable_named_by_participle_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def read(found):\n    kept = [said for said in found]\n    made, rows = 1, 2\n    known = kept and rows == 2\n"
        "    with open('a') as held:\n        for told, _ in rows:\n            wanted: int = 3\n"
        "    try:\n        named = not rows\n    except OSError as mine:\n        if (given := 3):\n            pass\n"
    )
    values = {line.split()[-1] for line in list_unclear_locals(tmp_path.glob("*.py"))}
    assert values == {"kept", "said", "made", "held", "told", "wanted", "mine", "given"}


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        if "examples" in path.parts:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert {name: lines for name, lines in places.items() if len(lines) > 1} == {}
