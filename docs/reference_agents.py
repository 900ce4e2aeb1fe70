"""Write AGENTS.md: how a coding agent works here, from the tables of CONTRIBUTING.md."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent

TOP = """\
# For coding agents

gangline trains large language models. A small core defines hooks; plugin packages in `packages/` supply all else.
[CONTRIBUTING.md](CONTRIBUTING.md) has the rules, [the code map](docs/code-map.md) one line for each source file, and
[docs/index.md](docs/index.md) all pages.

Set up, and check a change:

    python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt nox uv
    .venv/bin/nox -s lint types
    .venv/bin/nox -s quick -- PACKAGE

- Compare every change with one process: loss, gradients and state are equal on every layout.
- Never swallow an error, and never guess: refuse with a `UserError` that says what, why and what to type.
- Change the generated files by their generators (CONTRIBUTING.md, "Generated files").
- Write plain technical English: docstrings begin with a verb, names of tests have at most eight words.

"""


def page() -> str:
    """Return the text of AGENTS.md. Raises ValueError if CONTRIBUTING.md lacks the table."""
    heading = "## I want to add ..."
    _, found, after = (ROOT / "CONTRIBUTING.md").read_text().partition(heading)
    if not found:
        raise ValueError(f"CONTRIBUTING.md lacks the heading {heading!r}")
    return TOP + (heading + after.partition("\n## ")[0]).strip() + "\n"
