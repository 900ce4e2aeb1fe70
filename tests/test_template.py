"""templates/plugin: identical to the output of `gangline new-plugin mine`."""

from __future__ import annotations

from pathlib import Path

from gangline_testkit.new_plugin import make_files

TEMPLATE = Path(__file__).parent.parent / "templates" / "plugin"


def test_template_matches_new_plugin_output() -> None:
    kept = {str(path.relative_to(TEMPLATE)): path.read_text() for path in TEMPLATE.rglob("*") if path.is_file()}
    kept = {name: text for name, text in kept.items() if "__pycache__" not in name and not name.startswith(".")}
    fix = "rm -r templates/plugin && cd templates && gangline new-plugin mine && mv gangline-mine plugin"
    assert kept == make_files("mine", "tracker"), f"write it again: {fix}"
