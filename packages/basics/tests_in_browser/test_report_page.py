"""The page of `gangline report` in a headless Chromium: errors, requests, width, colours, folded blocks, print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from devtools import Page

NAMES = ("plain", "hostile", "both")
OPEN_ALL = "document.querySelectorAll('details').forEach(block => block.open = true)"
# text outside of tables that scroll by themselves, and figures, which is wider than the window
TOO_WIDE = """[...document.querySelectorAll('main *')]
    .filter(one => !one.closest('.scroll') && one.getBoundingClientRect().right > innerWidth + 0.5)
    .map(one => `${one.tagName}: ${one.textContent.slice(0, 60)}`)"""
# colour of letters and background of every element with text
CONTRASTS = """(() => {
    const light = colour => {
        const parts = colour.match(/[\\d.]+/g).slice(0, 3)
            .map(x => x / 255).map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]; };
    const behind = one => { for (; one; one = one.parentElement) {
        const colour = getComputedStyle(one).backgroundColor;
        if (!/, 0\\)$/.test(colour)) return colour; } return 'rgb(255, 255, 255)'; };
    const own = one => [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    return [...document.querySelectorAll('main *:not(title)')].filter(own).map(one => {
        const style = getComputedStyle(one), svg = one.closest('svg');
        const [a, b] = [light(svg && style.fill !== 'none' ? style.fill : style.color), light(behind(one))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.tagName + ': ' + one.textContent.slice(0, 40)];
    }).sort((one, other) => one[0] - other[0])[0]; })()"""


@pytest.mark.parametrize("name", NAMES)
def test_page_has_no_error_and_requests_nothing(page: Page, reports: dict[str, Path], name: str) -> None:
    page.open(reports[name])
    page.evaluate(OPEN_ALL)
    assert page.complaints == []
    assert page.requests == [reports[name].as_uri()]
    title = page.evaluate("document.title")
    assert title.endswith(" - gangline report")
    assert page.evaluate("document.scripts.length + document.images.length") == 0
    assert page.evaluate("document.compatMode") == "CSS1Compat"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [400, 1200])
def test_page_fits_the_width_of_a_window(page: Page, reports: dict[str, Path], name: str, width: int) -> None:
    page.open(reports[name], width=width)
    page.evaluate(OPEN_ALL)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(TOO_WIDE) == []
    sizes = page.evaluate("[...document.querySelectorAll('svg text')].map(one => one.getBoundingClientRect().height)")
    assert min(sizes) >= 9, "text in a figure is too small to read"
    outside = page.evaluate("""[...document.querySelectorAll('svg text')].filter(one => {
        const [a, b] = [one.getBoundingClientRect(), one.closest('svg').getBoundingClientRect()];
        return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
    }).map(one => one.textContent)""")
    assert outside == []


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_in_light_and_dark(page: Page, reports: dict[str, Path], dark: bool) -> None:
    page.open(reports["plain"], dark=dark)
    page.evaluate(OPEN_ALL)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
    ratio, where = page.evaluate(CONTRASTS)
    assert ratio >= 4.5, where  # WCAG 2.2, level AA
    axes = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    assert axes == ("rgb(232, 232, 232)" if dark else "rgb(26, 26, 26)")


def test_browser_reads_back_the_numbers_of_the_run(page: Page, reports: dict[str, Path]) -> None:
    run = reports["plain"].parent
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    page.open(reports["plain"])
    facts = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('header dl > div')].map(one =>"
        " [one.querySelector('dt').innerText, one.querySelector('dd').innerText]))"
    )
    assert facts["training loss"] == f"{lines[-1]['loss']:.4f} at step {len(lines)}"
    drawn = page.evaluate("[...document.querySelectorAll('svg path')].map(one => one.getAttribute('d'))")
    curve = next(line for line in drawn if line.count("L") == len(lines) - 1)
    heights = [float(y) for _, y in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", curve)]
    losses = [line["loss"] for line in lines]
    low, high = losses.index(min(losses)), losses.index(max(losses))
    scale = (heights[high] - heights[low]) / (losses[high] - losses[low])
    wanted = [heights[low] + scale * (loss - losses[low]) for loss in losses]
    assert heights == pytest.approx(wanted, abs=0.15), "the loss of each step, in points"
    names = page.evaluate("[...document.querySelectorAll('svg')].map(one => one.getAttribute('aria-label'))")
    assert all(names)
    assert len(names) == page.evaluate("document.querySelectorAll('svg > title').length")


def test_blocks_unfold_without_scripts(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["plain"])
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(reports["plain"], settle=False)
        before = page.call("Page.getLayoutMetrics")["cssContentSize"]["height"]
        root = page.call("DOM.getDocument")["root"]["nodeId"]
        summary = page.call("DOM.querySelector", nodeId=root, selector="summary")["nodeId"]
        page.call("DOM.focus", nodeId=summary)
        for kind in ("keyDown", "keyUp"):
            page.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )
        assert page.call("Page.getLayoutMetrics")["cssContentSize"]["height"] > before + 100
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)


def test_page_prints_without_a_cut_table(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["plain"], width=794, media="print")  # width of A4 in CSS pixels
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.evaluate(TOO_WIDE) == []
    assert len(page.call("Page.printToPDF")["data"]) > 10_000


def test_links_lead_to_the_sections(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["plain"])
    links = page.evaluate("[...document.querySelectorAll('nav a')].map(one => one.getAttribute('href'))")
    assert len(links) == 6
    assert page.evaluate(f"{json.dumps(links)}.every(link => document.querySelector(link)?.tagName === 'SECTION')")
