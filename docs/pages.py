"""Read the pages of the documentation and run their examples as a reader would, in a new directory for each page.

The language of a fenced block determines how it runs:

    bash      a script; it must succeed
    console   "$ command" lines, each followed by its output. "..." matches anything, a number with a decimal point
              matches any number; the output of a command without lines below it is not compared
    python    a program; it must succeed
    others    not run

If the first line of a block is a comment with only a file name ("# narrow.py"), the block is written to that file.

An HTML comment before a block changes this:

    <!-- exit code 2 -->        the exit code of the last command of the block
    <!-- not run: reason -->    not run
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
TIMEOUT = 600  # timeout of one command in seconds, for a busy machine

_BLOCK = re.compile(
    r"(?:<!-- (?P<said>[^>]*?) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_FILE = re.compile(r"(?:#!.*\n)?(?:#|//) (?P<name>[\w./-]+\.\w+)(?::.*)?\n")
# command -> module that it runs
_WARM = {"train": "gangline.cli.train", "gangline": "gangline", "torchrun": "torch.distributed.run"}
_OWN_WAY = re.compile(r"\b(PYTHON|OMP_|MKL_|LD_|TORCH_|LC_)\w*=")  # variables that change how Python starts
_NUMBER = re.compile(r"\d+\\\.\d+(?:e[+-]?\d+|e\\[+-]\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    said: str  # text of the HTML comment before the block

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """Return the name of the file that the block contains; None if it names none."""
        found = _FILE.match(self.text)
        return found["name"] if found else None

    @property
    def why_not(self) -> str | None:
        """Return the reason why the block is not run; None if it is run."""
        return self.said.removeprefix("not run:").strip() if self.said.startswith("not run:") else None

    @property
    def code(self) -> int:
        """Return the expected exit code of the last command."""
        found = re.fullmatch(r"exit code (\d+)", self.said)
        return int(found[1]) if found else 0


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["language"], found["text"], found["said"] or "")
        for found in _BLOCK.finditer(text)
    ]


def commands(text: str) -> list[tuple[str, str]]:
    """Return (command, expected output) pairs of a console block.

    A command continues on the next line after a backslash or an open bracket.
    """
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
    """Return the pattern that the output of a command must match."""
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
    """Return (directory of commands, environment variables) with the `pip` of `editable`, which only links."""
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
    """Return (directory of commands, environment variables) of a new virtual environment.

    The environment sees the packages that are installed here, such as torch. Core is installed again, for its commands.
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
    """Return a directory with the project's commands, forked from a process that has imported torch.

    `gangline_testkit.warm` forks them. The directory also has a `python`: it forks programs of the page, and starts
    Python normally for everything else.
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
    """A reader at a shell, in an empty directory with the recipes of the project.

    The reader's pip only links (`editable`). The commands of the project and the programs of the page are forked from a
    warm process, except in scripts that change how Python starts. With `real_pip` the reader has the real pip in a new
    virtual environment, and all processes start cold.
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
        """Run the blocks of a page, from top to bottom. Raises AssertionError if a result differs from the page."""
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
