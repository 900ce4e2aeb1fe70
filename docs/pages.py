"""Reads the pages of the documentation and runs what they show, as a reader would, in a fresh directory for each page.

How a fenced block is taken, by its language:

    bash      a script; it must succeed
    console   "$ command" lines, each followed by what it prints. "..." stands for anything, a number with a decimal
              point for any number; a command without output below it may print what it likes
    python    a program; it must succeed
    others    shown only
A block whose first lines hold a comment with nothing but a file name ("# narrow.py") is written to that file instead.

An HTML comment just before a block changes that:

    <!-- exit code 2 -->        how the last command of the block ends
    <!-- not run: reason -->    shown only
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from gangline_testkit import warm
from gangline_testkit.real_runs import copy_environment

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")])
RUN = ("bash", "console", "python")
TIMEOUT = 600  # seconds for one command, on a machine with other things to do

_BLOCK = re.compile(
    r"(?:<!-- (?P<said>[^>]*?) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_FILE = re.compile(r"(?:#!.*\n)?(?:#|//) (?P<name>[\w./-]+\.\w+)(?::.*)?\n")
# Commands, and the modules that they are.
_WARM = {"train": "gangline.cli.train", "gangline": "gangline", "torchrun": "torch.distributed.run"}
_OWN_WAY = re.compile(r"\b(PYTHON|OMP_|MKL_|LD_|TORCH_|LC_)\w*=")  # of starting Python
_NUMBER = re.compile(r"\d+\\\.\d+(?:e[+-]?\d+|e\\[+-]\d+)?")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    said: str  # the comment before it

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block shows."""
        found = _FILE.match(self.text)
        return found["name"] if found else None

    @property
    def why_not(self) -> str | None:
        """Why the block is not run, if it is not."""
        return self.said.removeprefix("not run:").strip() if self.said.startswith("not run:") else None

    @property
    def code(self) -> int:
        """The exit code that its last command should have."""
        found = re.fullmatch(r"exit code (\d+)", self.said)
        return int(found[1]) if found else 0


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["language"], found["text"], found["said"] or "")
        for found in _BLOCK.finditer(text)
    ]


def commands(text: str) -> list[tuple[str, str]]:
    """(command, what it prints) of a console block; a command goes on behind a backslash or an open bracket."""
    found: list[tuple[list[str], list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append(([line[2:]], []))
        elif not found[-1][1] and found[-1][0][-1].endswith("\\"):
            found[-1][0].append(line)
        else:
            found[-1][1].append(line)
    return [("\n".join(command), "\n".join(printed).strip("\n")) for command, printed in found]


def pattern(expected: str) -> re.Pattern[str]:
    """What a shown output matches."""
    lines = []
    for line in expected.splitlines():
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*?")
            continue
        words = [
            re.sub(r"\\\.\\\.\\\.", ".*", _NUMBER.sub(r"-?\\d+(?:\\.\\d+)?(?:e[+-]?\\d+)?", re.escape(word)))
            for word in line.split()
        ]
        lines.append(r"[ ]*" + r"[ ]+".join(words).replace("[ ]+.*", ".*").replace(".*[ ]+", ".*") + r"[ ]*\n")
    return re.compile("".join(lines))


def _with_links(directory: Path) -> tuple[Path, dict[str, str]]:
    """(directory of commands, variables) with a `pip` that links."""
    site, tools = directory / "site", directory / "tools"
    site.mkdir()
    tools.mkdir()
    pip = tools / "pip"
    pip.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        f"import editable\neditable.install(sys.argv[1:], {str(site)!r})\n"
    )
    pip.chmod(0o755)
    return tools, {"PYTHONPATH": str(site)}


def _with_pip(directory: Path) -> tuple[Path, dict[str, str]]:
    """(directory of commands, variables) of a new virtual environment that sees what is installed here, torch above
    all. Core is installed anew, for its commands.
    """
    there = directory / "venv"
    subprocess.run([sys.executable, "-m", "venv", there], check=True)
    python = there / "bin" / "python"
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    (site / "of_the_tests.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    install = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--ignore-installed",
        "-e",
        ROOT / "packages" / "core",
    ]
    subprocess.run(install, check=True)
    return there / "bin", {"VIRTUAL_ENV": str(there)}


def _warm(directory: Path, environment: dict[str, str]) -> Path:
    """A directory of the project's commands, forked from a process that has torch (`gangline_testkit.warm`).

    And of a `python` by which a program of the page is forked, too, and which is itself for all else.
    """
    made = directory / "warm"
    made.mkdir()
    for name, module in _WARM.items():
        command = made / name
        command.write_text(f'#!/bin/sh\nexec {shlex.join(warm.make_command(module, environment))} "$@"\n')
        command.chmod(0o755)
    forked = shlex.join(warm.make_command("", environment)[:-1])
    python = made / "python"
    python.write_text(
        f'#!/bin/sh\nif [ -f "$1" ] && [ "${{1%.py}}" != "$1" ] && [ "${{1#*/}}" = "$1" ]; then\n'
        f'    program=${{1%.py}}; shift; exec {forked} "$program" "$@"\nfi\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return made


class Reader:
    """Somebody at a shell, in an empty directory that has the project's recipes in it.

    Their pip is a quick one that only links (`editable`), and the project's commands and the page's programs start warm
    where a script does not start Python in a way of its own; with `real_pip` it is pip itself, in a virtual environment
    of their own, and all starts cold.
    """

    def __init__(self, directory: Path, *, real_pip: bool = False) -> None:
        self.directory = directory / "here"
        self.directory.mkdir()
        shutil.copytree(ROOT / "configs", self.directory / "configs")
        kept = copy_environment()
        tools, site = _with_pip(directory) if real_pip else _with_links(directory)
        search = [str(tools), str(Path(sys.executable).parent), kept.get("PATH", "")]
        alike = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # the pages show a machine without a GPU
        self.environment = {**kept, **alike, "PATH": os.pathsep.join(search), **site}
        self._warm = None if real_pip else _warm(directory, self.environment)

    def read(self, page: Path) -> None:
        """Do what the page says, from top to bottom. Raises AssertionError where it is not so."""
        for block in blocks(page):
            if block.why_not is None:
                self._do(block)

    def _do(self, block: Block) -> None:
        if block.file:
            path = self.directory / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "bash":
            self._run(block, block.text, block.code)
        elif block.language == "python":
            (self.directory / "example.py").write_text(block.text)
            self._run(block, "python example.py", block.code)
        elif block.language == "console":
            every = commands(block.text)
            for number, (command, expected) in enumerate(every, 1):
                printed = self._run(block, command, block.code if number == len(every) else 0)
                if expected:
                    assert pattern(expected).fullmatch(printed), (
                        f"{block.place}: {command}\n--- the page shows\n{expected}\n--- it prints\n{printed}"
                    )

    def _run(self, block: Block, script: str, code: int) -> str:
        environment = self.environment
        if self._warm is not None and not _OWN_WAY.search(script):
            environment = {**environment, "PATH": f"{self._warm}{os.pathsep}{environment['PATH']}"}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == code, (
            f"{block.place}: exit code {done.returncode}, expected {code}\n{script}\n---\n{done.stdout}"
        )
        return done.stdout.rstrip() + "\n"
