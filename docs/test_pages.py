"""Reader of the documentation pages: detects examples that fail or print something else."""

from __future__ import annotations

from pathlib import Path

import pages
import pytest
from pages import ROOT, Block, Reader


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss 3.1415", "loss 2.7\n", True),
        ("loss 3.1415", "lost 3.1415\n", False),
        ("step 1/20  lr 1.50e-03  ...", "step 1/20   lr 3e-4  12 k tok/s\n", True),
        ("step 1/20", "step 2/20\n", False),
        ("a\n...\nb", "a\nmore\nand more\nb\n", True),
        ("a\n...\nb", "a\nb\n", True),
        ("a\nb", "a\nmore\nb\n", False),
        ("a", "a\nb\n", False),
        ("...is done", "it is done\n", True),
        ("version 0.1.0", "version 0.1.0\n", True),
    ],
)
def test_shown_output_matches_printed_output(shown, printed, same):
    assert bool(pages.pattern(shown).fullmatch(printed)) is same


def read(tmp_path: Path, text: str) -> None:
    page = ROOT / "docs" / "nowhere.md"
    reader = Reader(tmp_path)
    for found in pages._BLOCK.finditer(text):
        reader._do(Block(page, 1, found["language"], found["text"], found["said"] or ""))


@pytest.mark.parametrize(
    "text",
    [
        "```console\n$ echo a\nb\n```",
        "```console\n$ false\n```",
        "```bash\nfalse\ntrue\n```",
        "<!-- exit code 2 -->\n```console\n$ true\n```",
        "<!-- exit code 2 -->\n```console\n$ exit 2\n$ exit 2\n```",
        "```python\nassert False\n```",
        '```toml\n# p/pyproject.toml\n[project]\nname = "p"\nversion = "0"\n```\n'
        "```python\n# p/one.py\n```\n```python\n# p/two.py\n```\n```bash\npip install -e p\n```",
        "```python\n# wrong.py\nassert False\n```\n\n```bash\npython wrong.py\n```",
    ],
)
def test_wrong_example_is_reported(tmp_path, text):
    with pytest.raises(AssertionError, match=r"docs/nowhere\.md:1"):
        read(tmp_path, text)


def test_correct_example_passes(tmp_path):
    read(
        tmp_path,
        "```yaml\n# some/file.yaml\na: 1\n```\n\n```console\n$ cat some/file.yaml\n# some/file.yaml\na: 1\n```\n\n"
        "<!-- exit code 3 -->\n```console\n$ echo \\\n  two words\ntwo words\n$ exit 3\n```\n",
    )


def test_only_python_program_examples_preload_torch(tmp_path):
    read(
        tmp_path,
        "```python\n# program.py\nimport sys\nassert 'torch' in sys.modules and __name__ == '__main__'\n"
        "print(sys.argv[1:])\n```\n\n```console\n$ python program.py 'a b' c\n['a b', 'c']\n"
        "$ python -c 'import sys; print(\"torch\" in sys.modules)'\nFalse\n"
        '$ echo \'assert "torch" not in __import__("sys").modules\' | python\n```\n',
    )
