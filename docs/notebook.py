"""Run the notebooks of the documentation in an empty directory, and store their outputs: `python docs/notebook.py`.

Stored outputs contain no execution counts, times, paths of this machine or control characters of a terminal.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from notebook_page import list_notebooks

ROOT = Path(__file__).parent.parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
TIMEOUT = 600  # timeout of one cell in seconds, for a busy machine
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_notebook(path: Path, directory: Path) -> NotebookNode:
    """Run all cells of a notebook with a Jupyter kernel in a directory; return the notebook with its outputs.

    Raises CellExecutionError if a cell fails. The notebook's commands are those of this Python's environment.
    """
    notebook = nbformat.read(path, as_version=4)
    settings = directory.parent / "jupyter"
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": commands, "IPYTHONDIR": str(settings), "JUPYTER_RUNTIME_DIR": str(settings)}
    client = NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", record_timing=False, coalesce_streams=True
    )
    client.execute(cwd=str(directory), env=environment)
    return notebook


def normalize(notebook: NotebookNode, directory: Path | None = None) -> str:
    """Return the text of a notebook file, with `...` in place of the directory in which the notebook ran."""
    notebook = nbformat.from_dict(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, 1):
        cell.id, cell.metadata = f"cell-{number}", NotebookNode()
        for output in cell.get("outputs", []):
            if "execution_count" in output:
                output.execution_count = None
            if "text" in output:
                output.text = clean(output.text, directory)
        if cell.cell_type == "code":
            cell.execution_count = None
    return nbformat.writes(notebook, indent=1, ensure_ascii=False) + "\n"


def clean(text: str, directory: Path | None) -> str:
    """Return the text that a terminal would show in the end, with `...` in place of the directory."""
    if directory is not None:
        name, short = re.escape(str(directory)), "...".rjust(len(str(directory)))
        text = re.sub(rf"(\S {{2,}}){name}", rf"\1{short}", text)  # columns of a table stay aligned
        text = text.replace(str(directory), "...")
    lines = CONTROLS.sub("", text.replace("\r\n", "\n")).split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines)


def main() -> None:
    """Run every notebook of the documentation, and write its outputs into its file."""
    for path in list_notebooks(ROOT / "docs"):
        with tempfile.TemporaryDirectory() as made:
            directory = Path(made).resolve() / "here"
            directory.mkdir()
            begun = time.monotonic()
            text = normalize(run_notebook(path, directory), directory)
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {time.monotonic() - begun:.0f} s, {len(text.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
