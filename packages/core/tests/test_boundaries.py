"""Import rules: core imports no plugin, and modules that must start fast import no torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import gangline

pytestmark = pytest.mark.usefixtures("core_alone")

SOURCE = Path(gangline.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*") if path.suffix in (".py", ".yaml", ".toml", ".jinja"))
OF_PLUGINS = re.compile(r"expert|\bmoe\b|megatron|zarr|\bdali\b", re.IGNORECASE)


def test_core_source_mentions_no_plugin():
    said = {
        f"{path.relative_to(SOURCE)}:{number}": line.strip()
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OF_PLUGINS.search(line)
    }
    assert said == {}


def test_core_imports_no_other_package():
    """Check that core neither imports nor names a module of another package: it uses only the installed parts."""
    packages = {path.name for path in SOURCE.parents[2].glob("*/src/gangline_*")}
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in FILES
        if path.suffix == ".py" and "specs" not in path.parts  # the examples in specs are plugins
        for name in re.findall(r"(?:from |import )(gangline_[a-z_]+)|\b(gangline_[a-z_]+)[.:]\w", path.read_text())
        if packages & {*name}
    }
    assert len(packages) > 10
    assert found == set()


def test_plugin_pattern_matches_catalogue():
    assert {word.lower() for word in OF_PLUGINS.findall((SOURCE / "plugin/catalogue.json").read_text())} >= {
        "moe",
        "zarr",
        "dali",
    }


def test_only_config_modules_import_hydra():
    importers = {
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if any(name.split(".")[0] == "hydra" for name in imported(node))
    }
    assert importers == {"config/compose.py", "config/known_options.py", "config/preflight.py"}  # the second for types
    code = " ".join(token.string for path in FILES if path.suffix == ".py" for token in code_of(path))
    for word in ("_internal", "_target_", "instantiate"):
        assert not re.search(rf"\b{word}\b", code)


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def code_of(path: Path):
    with path.open("rb") as file:
        return [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME]


def test_config_folders_are_packages():
    conf = SOURCE / "conf"
    assert all(
        (folder / "__init__.py").exists()
        for folder in [conf, *conf.rglob("*")]
        if folder.is_dir() and folder.name != "__pycache__"
    )


TORCH_FREE = [
    ["gangline.cli.train", "--help"],
    ["gangline.cli.train", "optimizer=muon", "--help"],
    ["gangline.cli.train", "--cfg", "job"],
    ["gangline.cli.train", "--completion", "bash"],
    ["gangline.cli.train", "--complete", "parallel="],
    ["gangline.cli.main", "plugins"],
    ["gangline.cli.main", "--help"],
    ["gangline.cli.main", "compare", "--help"],
]


def loaded(words: list[str], tmp_path: Path) -> set[str]:
    """Return the modules that a command has imported when it ends."""
    code = (
        "import runpy, sys\n"
        "module, *words = sys.argv[1:]\nsys.argv = [module, *words]\n"
        "try: runpy.run_module(module, run_name='__main__')\n"
        "except SystemExit as done: assert not done.code, done.code\n"
        "print(*sys.modules, sep='\\n', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip()
    return set(done.stderr.split())


@pytest.mark.parametrize("words", TORCH_FREE, ids=" ".join)
def test_command_imports_no_torch_and_no_matplotlib(tmp_path, words):
    modules = loaded(words, tmp_path)
    assert not {"torch", "matplotlib"} & modules
    if "--cfg" not in words:
        assert not {"hydra", "omegaconf", "numpy"} & modules


@pytest.mark.parametrize("words", TORCH_FREE[:1] + TORCH_FREE[-3:-1], ids=" ".join)
def test_help_and_plugins_import_no_rich_or_yaml(tmp_path, words, monkeypatch):
    """Run with every installed plugin, because each of these modules would take 15 to 60 ms to import."""
    monkeypatch.delenv("GANGLINE_PLUGINS", raising=False)
    assert not {"rich", "yaml", "gangline.run.directory"} & loaded(words, tmp_path)


def test_train_module_imports_no_heavy_package():
    code = (
        "import sys; before = set(sys.modules); import gangline.cli.train\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "hydra", "omegaconf", "rich", "numpy", "yaml"} & set(done.stdout.split())


def test_preparing_a_run_imports_no_torch(tmp_path):
    code = (
        "import sys\nfrom gangline import api\nfrom gangline.config.compose import compose_one\n"
        "api.prepare(compose_one(['parallel=ddp', 'launch.processes=2']))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=240)


def test_a_run_built_in_python_imports_no_hydra(tmp_path):
    code = (
        "import sys\nfrom gangline import api\nfrom gangline.config.defaults import build_default_run\n"
        "from gangline.run.directory import RunDirectory\n"
        "made = api.prepare(build_default_run(run={'dir': 'out'}))\nRunDirectory.open('out').run()\n"
        "assert not {'hydra', 'omegaconf', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=240)


def test_train_runs_without_environment_variables(tmp_path):
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "gangline.cli.train", "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
