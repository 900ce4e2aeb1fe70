"""Check the notebooks of the documentation: every cell runs in a Jupyter kernel, and stored outputs are clean."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import notebook
import pytest
from notebook_page import convert, list_notebooks
from pages import ROOT

from gangline.record import read_records

FIRST_RUN = ROOT / "docs" / "notebooks" / "first-run.ipynb"
LARGEST = 300_000  # bytes
CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")  # all controls of a terminal except colours and bold letters


def list_images(content: nbformat.NotebookNode) -> list[int]:
    """Return the number of the cell for each image among the outputs."""
    outputs = [(number, output) for number, cell in enumerate(content.cells) for output in cell.get("outputs", [])]
    return [number for number, output in outputs if "image/png" in output.get("data", {})]


@pytest.mark.waits  # for commands that start ranks
def test_first_run_notebook_trains_resumes_and_tunes(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    directory = tmp_path / "empty"
    directory.mkdir()
    stored = nbformat.read(FIRST_RUN, as_version=4)
    ran = notebook.run_notebook(FIRST_RUN, directory)
    losses = {
        name: [record["loss"] for record in read_records(str(directory / "runs" / name / "metrics.jsonl"))]
        for name in ("first", "killed", "two", "zen")
    }
    assert {len(each) for each in losses.values()} == {80}
    assert losses["first"][-1] < 0.6 * losses["first"][0]
    assert losses["zen"][-1] < 0.3 * losses["zen"][0]
    assert losses["killed"] == losses["first"]
    assert losses["two"] == pytest.approx(losses["first"], abs=1e-4)
    assert list_images(ran) == list_images(stored)
    assert len(list_images(ran)) == 2
    printed = "".join(output.get("text", "") for cell in ran.cells for output in cell.get("outputs", []))
    assert not CURSOR.findall(printed)


@pytest.mark.parametrize("path", list_notebooks(ROOT / "docs"), ids=lambda path: path.stem)
def test_stored_notebook_is_small_and_clean(path):
    text = path.read_text()
    assert text == notebook.normalize(nbformat.reads(text, as_version=4)), "run:  python docs/notebook.py"
    assert len(text.encode()) < LARGEST
    assert not [word for word in ("/tmp/", "/home/", "/root/", "Warning", "Error") if word in text]


def test_page_has_cells_outputs_and_images_of_notebook():
    text, images = convert(FIRST_RUN)
    assert list(images) == ["first-run-1.png", "first-run-2.png"]
    assert all(content.startswith(b"\x89PNG") and f"]({name})" in text for name, content in images.items())
    assert "````bash\n!train resume=runs/killed\n````" in text
    assert '````text title="Output"\nTrue\n````' in text


def test_terminal_output_is_stored_as_shown():
    assert notebook.clean("a 1\rb 2\r\n\x1b[2K\x1b[91mc\x1b[0m in /data/d\n", Path("/data")) == "b 2\nc in .../d\n"


def test_stored_tables_stay_aligned():
    table = "path  null  /data/d/a\nlong  null    /data/d\nlora  null         on\n"
    assert notebook.clean(table, Path("/data/d")) == (
        "path  null      .../a\nlong  null        ...\nlora  null         on\n"
    )
