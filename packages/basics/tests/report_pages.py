"""Pages of `gangline report`, as their tests read them, and the files of a run, as their tests change them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from gangline_basics.runs.report.command import main as report

QUICK = ("recipe=quick", "track=[console,jsonl]", "validate.every=5", "validate.samples=8")


@dataclass
class Page(HTMLParser):
    """Content of a page as a browser reads it: rows of tables, facts, texts, and the attributes of elements."""

    html: str
    rows: list[list[str]] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    attributes: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[list[str]] = []
        self._name = ""
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag != "meta":
            self._open.append([])

    def handle_data(self, data: str) -> None:
        for text in self._open:
            text.append(data)

    def handle_endtag(self, tag: str) -> None:
        text = "".join(self._open.pop())
        if tag in ("td", "th"):
            self.rows[-1].append(text)
        elif tag == "dt":
            self._name = text
        elif tag == "dd":
            self.facts[self._name] = text
        elif tag == "p":
            self.notes.append(text)
        elif tag == "h2":
            self.headings.append(text)

    def find_row(self, *first: str) -> list[str]:
        return next(row for row in self.rows if row[: len(first)] == [*first])


def write_report(*words: str | Path) -> Page:
    assert report([*map(str, words)]) == 0
    texts = [str(word) for word in words]
    out = Path(texts[texts.index("--out") + 1]) if "--out" in texts else Path(texts[0]) / "report.html"
    return Page(out.read_text())


def copy(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to, ignore=shutil.ignore_patterns("report.html")))


def read_lines(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def write_lines(run: Path, lines: list[dict], name: str = "metrics.jsonl") -> None:
    (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
