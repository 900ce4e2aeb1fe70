"""Check the documentation: every example runs, every link has a target, every hook and option is described."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pages
import pytest
import reference
import reference_options
import yaml
from mdtext import anchor
from pages import ROOT, RUN, Reader, blocks

from gangline.config.fields import iterate_options
from gangline.config.schema import PartConfig
from gangline.config.sections import SECTIONS
from gangline.model.tree import Node
from gangline.plugin.hooks import GROUPS, HOOKS, LISTS
from gangline.plugin.registry import installed
from gangline_testkit.new_plugin import make_files

WITH_EXAMPLES = [
    page for page in pages.PAGES if any(block.language in RUN and not block.why_not for block in blocks(page))
]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.waits  # for commands that start ranks
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name)
def test_every_example_of_a_page_runs(page, tmp_path):
    Reader(tmp_path).read(page)


# Pages that install something, and pages whose programs import modules that a warm start has already imported.
COLD = [
    page
    for page in WITH_EXAMPLES
    if "pip install -e" in page.read_text()
    or any(b.language == "python" and not (b.file or b.why_not) for b in blocks(page))
]


@pytest.mark.nightly
@pytest.mark.parametrize("page", COLD, ids=name)
def test_every_example_runs_with_the_real_pip(page, tmp_path):
    Reader(tmp_path, real_pip=True).read(page)


# --- README, workflow and code map ---

README = ROOT / "README.md"


def code(page: Path) -> str:
    return "\n".join(block.text for block in blocks(page))


def test_readme_shows_check_command():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert command in code(README)


def test_public_workflow_runs_checks_and_nightly_tests():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    assert set(workflow[True]) == {"push", "pull_request", "schedule"}  # YAML 1.1 reads the key `on` as true
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in workflow["jobs"].items()}
    own = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    as_root = f"{own.removesuffix('.venv/bin/nox')}sudo .venv/bin/nox -s slurm"
    assert commands == {"default": [".ci/run"], "slurm": [as_root], "nightly": [f"{own} -s nightly"]}


def test_readme_training_command_matches_main_job():
    noxfile = (ROOT / "noxfile.py").read_text()
    constraints, packages, train = re.search(
        r"\.venv/bin/pip install -c (\S+)((?: -e \S+)+) && \.venv/bin/(\w+)$", code(README), re.MULTILINE
    ).groups()
    main_job = re.search(r"^def train\(.*?(?=^@|\Z)", noxfile, re.MULTILINE | re.DOTALL)[0]
    assert f'ROOT / "{constraints}"' in noxfile
    assert packages.split() == ["-e", "packages/core", "-e", "packages/basics", "-e", "packages/gangline"]
    assert 'editable("core", "basics", "gangline")' in main_job
    assert f'session.run("{train}", ' in main_job


def tree() -> dict[Path, str]:
    """Return path -> phrase, from the tree of the repository in docs/code-map.md."""
    text = next(block.text for block in blocks(ROOT / "docs" / "code-map.md") if block.text.startswith("README.md "))
    found, above = {}, [ROOT]
    for line in text.splitlines():
        indent, entry, phrase = re.fullmatch(r"( *)(\S+) *(.*)", line).groups()
        del above[len(indent) // 2 + 1 :]
        found[above[-1] / entry] = phrase
        if entry.endswith("/"):
            above.append(above[-1] / entry)
    return found


def test_code_map_matches_repository():
    shown = tree()
    assert not [path for path in shown if not path.exists()]
    folders = {path.name for path in ROOT.iterdir() if path.name[0] != "." and any(path.rglob("*.py"))}
    assert folders <= {path.relative_to(ROOT).parts[0] for path in shown}
    maps = {path.stem for path in (ROOT / "docs" / "code-map").glob("*.md")}
    assert maps == {path.parent.name for path in ROOT.glob("packages/*/src")} | {"tests"}


def test_code_map_describes_every_source_file():
    for package in ROOT.glob("packages/*/src"):
        files = {path.name for path in package.rglob("*.py")}
        files |= {path.name for path in package.parent.glob("tests*/test_*.py")}
        page = ROOT / "docs" / "code-map" / f"{package.parent.name}.md"
        lines = re.findall(r"^ +(\w+\.py)(.*)$", page.read_text(), re.MULTILINE)
        assert files - {"__init__.py"} == {file for file, _ in lines} - {"__init__.py"}
        assert [file for file, phrase in lines if not phrase.strip()] == []


@pytest.mark.parametrize("page", pages.PAGES, ids=name)
def test_skipped_example_gives_reason(page):
    for block in blocks(page):
        if block.said.startswith("not run"):
            assert block.why_not, f"{block.place}: <!-- not run: and the reason -->"


def test_every_example_comment_is_a_known_directive():
    known = re.compile(r"not run: .+|exit code \d+")
    strange = [
        block.place for page in pages.PAGES for block in blocks(page) if block.said and not known.fullmatch(block.said)
    ]
    assert not strange


# --- links and paths --------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor(heading.replace("`", "")) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", pages.PAGES, ids=name)
def test_every_link_resolves(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, heading = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), f"{name(page)}: {target}"
        assert not heading or heading in anchors(aim), f"{name(page)}: {target}"


@pytest.mark.parametrize("page", pages.PAGES, ids=name)
def test_no_page_contains_machine_specific_path(page):
    found = re.findall(r"(?<![\w.])/(?:home|root|work|Users|tmp/\w+)\b\S*", page.read_text())
    assert not found


def test_every_page_can_be_reached_from_the_readme():
    seen: set[Path] = set()
    to_read = [README]
    while to_read:
        page = to_read.pop()
        if page not in seen:
            seen.add(page)
            links = re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", page.read_text())
            to_read += [(page.parent / link).resolve() for link in links if not link.startswith("http")]
    assert {name(page) for page in pages.PAGES} <= {name(page) for page in seen}


# --- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", reference.pages(), ids=lambda path: path.name)
def test_reference_matches_code(path):
    assert path.read_text() == reference.pages()[path], f"regenerate with:  {reference.COMMAND}"


def under(page: str, heading: str) -> str:
    """Return the lines of a page under a heading, up to the next heading of any level. Skips `#` in code blocks."""
    found, inside, fenced = [], False, False
    for line in (ROOT / "docs" / page).read_text().splitlines():
        fenced ^= line.startswith("```")
        if line.startswith("#") and not fenced:
            inside = line.lstrip("#").strip() == heading
        elif inside:
            found.append(line)
    assert found, f"docs/{page} has no heading {heading}"
    return "\n".join(found)


@pytest.mark.parametrize("hook", [hook.name for hook in HOOKS])
def test_every_hook_is_documented_with_an_example(hook):
    assert f"def {hook}():" in under("hooks.md", hook)


def test_every_option_of_every_part_is_documented():
    ours = reference_options.ours()
    assert set(GROUPS) - {"health", "callback"} <= set(ours)
    for group, offers in ours.items():
        for offer in offers:
            page = f"options/{group.replace('/', '-')}.md"
            text, base = under(page, f"{group}={offer.part.name}"), offer
            while (base := reference_options.base_of(base, offers)) is not None:
                text += under(page, f"{group}={base.part.name}")
            place = f"{group}.{offer.part.name}" if group in LISTS else group
            for option in iterate_options(offer.part.config, place):
                assert f"| `{option.path}` | " in text, f"{group}={offer.part.name}: {option.path}"
                assert option.comment, f"{group}={offer.part.name}: no comment behind {option.path} says what it is"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_of_every_section_is_documented(section):
    for option in iterate_options(SECTIONS[section], section):
        assert f"| `{option.path}` | " in under("options.md", section)
        assert option.comment, f"{option.path}: no comment behind it says what it is"


def test_plugin_guide_lists_every_plugin_kind():
    guide = (ROOT / "docs" / "plugins.md").read_text()
    for kind in installed().get_kinds().values():
        if kind.example.startswith("gangline."):
            assert re.search(
                rf"^\| `{kind.name}` \| .* \| `{kind.suite.partition(':')[2]}` \|$", guide, re.MULTILINE
            ), kind


def test_model_how_to_matches_new_plugin_output():
    example = make_files("squared", "model")
    shown = {block.file: block.text for block in blocks(ROOT / "docs" / "how-to" / "model.md") if block.file}
    for name in ("gangline_squared/__init__.py", "gangline_squared/modules.py"):
        code = [line for line in example[name].splitlines() if not line.startswith("# ")]
        assert shown[f"gangline-squared/{name}"].splitlines()[1:] == code


def test_paths_in_contributing_exist():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## I want to add ...")[2].partition("\n## ")[0]
    paths = [path for path in re.findall(r"`([^`\s]+)`", table) if "/" in path or path.endswith((".md", ".py"))]
    assert len(paths) > 40
    assert not [path for path in paths if path != "config.py" and not (ROOT / path).exists()]


def test_every_command_is_documented():
    everything = "\n".join(code(page) for page in pages.PAGES)
    for verb in installed().get_commands():
        assert f"gangline {verb}" in everything, verb


# --- the glossary -----------------------------------------------------------------------------------------------------

GLOSSARY = ROOT / "docs" / "glossary.md"


def identifiers() -> set[str]:
    """Return every identifier in the code of the packages, and the words of strings that are identifiers."""
    found: set[str] = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        found.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            for field in ("name", "id", "attr", "arg"):
                found.add(getattr(node, field, None) or "")
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 40:
                found |= set(re.findall(r"\w+", node.value))
    return found


def terms() -> list[list[str]]:
    """Return the rows of the glossary's tables: term, meaning, name in the code, source."""
    rows = [line.strip("|").split("|") for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if len(row) == 4 and row[0].strip() != "term"]


def test_glossary_identifiers_exist_in_code():
    known = identifiers()
    assert not {"ParamShard_is_no_name", "colwisely"} & known
    code = [word for row in terms() for cell in row for word in re.findall(r"`([^`]+)`", cell)]
    assert len(code) > 100
    assert not [word for word in code if not set(re.findall(r"\w+", word)) <= known]


def test_glossary_has_no_duplicate_terms_or_shape_letters():
    names = [part for row in terms() for part in row[0].split(", ")]
    names += re.findall(r"^\| ([A-Za-z](?:, [A-Z])*) \|", GLOSSARY.read_text(), re.MULTILINE)
    assert len(names) > 100
    assert sorted({name for name in names if names.count(name) > 1}) == []


def classes_of_core() -> set[type]:
    """Return the classes of core that other packages import, except basics, which imports from all modules of core."""
    found = set()
    for path in set(ROOT.glob("packages/*/src/gangline_*/**/*.py")) - set(ROOT.glob("packages/basics/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gangline":
                module = importlib.import_module(str(node.module))
                found |= {value for alias in node.names if inspect.isclass(value := getattr(module, alias.name, None))}
    return found


def test_glossary_lists_every_imported_core_class():
    """Check that the glossary has every core class that plugins use. Configurations and nodes have separate pages."""
    listed = set(re.findall(r"\w+", " ".join(cell for row in terms() for cell in row)))
    classes = {cls for cls in classes_of_core() if not issubclass(cls, PartConfig | Node)}
    assert {"Comm", "Checkpointer", "Runtime"} <= {cls.__name__ for cls in classes}
    missing = [cls.__name__ for cls in classes if not cls.__name__.endswith("Section") and cls.__name__ not in listed]
    assert missing == []
