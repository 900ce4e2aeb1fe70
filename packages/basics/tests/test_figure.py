"""Figures: readability, identical bytes for identical data, SVG and PNG, atomic writes.

An unreadable figure is detected.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib import rc_context, rcParams
from PIL import Image

from gangline.errors import UserError
from gangline_basics.figure import (
    INK,
    PALETTE,
    add_bars,
    add_legend,
    add_tip,
    make_subplots,
    render,
    use_integer_ticks,
    use_style,
    write_figure,
)
from gangline_testkit import list_readable, list_tips, list_words


@use_style()
def drawn(title="A run, steps 1 to 20"):
    """Return a figure with two plots that use every element of the module."""
    figure, (above, below) = make_subplots(title, "what it shows\nand how", heights=[2.5, 1])
    for number in range(9):
        above.plot([1, 2, 3], [1, 2, 3 + number], label=f"run {number}")
    above.set(xlabel="step", ylabel="loss (nats)")
    add_legend(above)
    (dot,) = above.plot(1.5, 1, "o")
    add_tip(dot, 'a <tip> & "more"')
    add_bars(below, {"compute": 3.0, "waits": 1.0}, PALETTE)
    below.set(xlabel="seconds")
    return figure


@pytest.mark.parametrize("title", ["short", "one & <two> $3$ " * 20, "x" * 200])
def test_figure_is_readable(title):
    words = list_readable(drawn(title))
    lines = words.index("what it shows")
    assert "".join("".join(words[:lines]).split()) == "".join(title.split())
    assert words[lines + 1] == "and how"
    assert {"step", "loss (nats)", "seconds", *(f"run {number}" for number in range(9))} <= set(words)
    assert {"3 s, 75.0%", "1 s, 25.0%"} <= set(words)


def test_plots_have_requested_heights():
    figure = drawn("x " * 300)
    render(figure, ".svg")
    above, below = (axes.get_position().height * figure.get_figheight() for axes in figure.axes)
    assert above == pytest.approx(2.5, abs=0.05)
    assert below == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_figure_bytes_do_not_depend_on_matplotlib_settings(ending):
    first, before = render(drawn(), ending), dict(rcParams)
    with rc_context({"font.size": 20, "axes.facecolor": "red", "svg.hashsalt": "mine"}):
        assert render(drawn(), ending) == first
    assert dict(rcParams) == before


def test_svg_and_png_have_same_content():
    svg, png = (render(drawn(), ending) for ending in (".svg", ".png"))
    assert sorted(list_words(svg.decode())) == sorted(list_readable(drawn()))
    assert list_tips(svg.decode()) == ['a <tip> & "more"']
    colours = {
        "#{:02x}{:02x}{:02x}".format(*rgb) for _, rgb in Image.open(io.BytesIO(png)).convert("RGB").getcolors(1 << 20)
    }
    assert {INK, *PALETTE} <= colours


def test_axis_of_ranks_has_ticks_at_integers():
    figure, (axes,) = make_subplots("Ranks")
    axes.plot([0, 1, 2], [0, 1, 2])
    use_integer_ticks(axes.xaxis, axes.yaxis)
    axes.grid(False)
    assert [word for word in list_readable(figure) if word != "Ranks"] == ["2", "1", "0", "0", "1", "2"]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda figure: figure.text(0.98, 0.5, "too far right"), "ends at x="),
        (lambda figure: figure.text(0.01, 0.5, "too far left", ha="right"), "beyond the left edge"),
        (lambda figure: figure.text(0.5, -0.01, "too low"), "extends below the figure"),
        (lambda figure: figure.text(0.01, 0.98, "over the title", va="top"), "overlap"),
        (lambda figure: figure.text(0.5, 0.03, "small", size=6), "has 6.0 points, less than 8"),
        (lambda figure: figure.text(0.5, 0.03, "pale", color="#999999"), "has the colour #999999"),
        (lambda figure: figure.suptitle(""), "is not the title"),
        (lambda figure: figure.axes[0].legend(), "a legend overlaps a plot"),
    ],
)
def test_unreadable_figure_is_detected(spoil, complaint):
    figure = drawn()
    with use_style():
        spoil(figure)
    with pytest.raises(AssertionError, match=complaint):
        list_readable(figure)


def test_figure_file_is_written_atomically(tmp_path, monkeypatch):
    path = tmp_path / "a.svg"
    write_figure(drawn(), path)
    assert path.read_bytes() == render(drawn(), ".svg")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"--svg .*a\.svg cannot be written\.\n  No space left on device\."):
        write_figure(drawn("another"), path)
    assert path.read_bytes() == render(drawn(), ".svg")
    assert os.listdir(tmp_path) == ["a.svg"]


def test_invalid_extension_or_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--picture a\.gif must end with \.svg or \.png"):
        write_figure(drawn(), "a.gif", "--picture", (".svg", ".png"))
    message = r"--svg .*none/a\.svg cannot be written\.\n.*\n  Create the directory:  mkdir -p"
    with pytest.raises(UserError, match=message):
        write_figure(drawn(), tmp_path / "none" / "a.svg")


def test_missing_matplotlib_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r'figures need matplotlib\.\n  pip install "gangline-basics\[pictures\]"'):
        drawn()


@pytest.mark.parametrize("home", ["/dev/null", "{}"])
def test_figure_needs_no_home_directory_or_display(tmp_path, home):
    """Check that an unwritable home directory and a missing display cause no message."""
    code = (
        "import sys; from gangline_basics.figure import *; figure, (axes,) = make_subplots('Title')\n"
        "axes.plot([1, 2])\n"
        "write_figure(figure, 'a.svg'); write_figure(figure, 'a.png', '--picture', ['.png'])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    gone = ("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "DISPLAY")
    environment = {name: value for name, value in os.environ.items() if name not in gone}
    environment |= {"HOME": home.format(tmp_path), "MPLBACKEND": "TkAgg"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"a.svg", "a.png"} <= {path.name for path in Path(tmp_path).iterdir()}


def test_notebook_shows_figure_with_requested_heights(monkeypatch):
    shown = []
    fake = SimpleNamespace(Image=dict, display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    figure = drawn()
    figure._ipython_display_()
    assert shown == [{"data": render(figure, ".png"), "format": "png", "width": 840}]
