"""`gangline conform`: a table for passing parts; a line and exit code 1 for failing parts."""

import subprocess

import pytest

from gangline_testkit.new_plugin import make_files

SOURCE = make_files("mine", "tracker")["gangline_mine.py"]


@pytest.fixture
def conform(strangers, tmp_path):
    def run(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--no-such-flag"\n')
        strangers.add("gangline-mine", source, module="gangline_mine")
        words = arguments or ("gangline-mine",)
        return strangers.run("gangline.cli.main", "conform", *words, cwd=tmp_path, timeout=300)

    return run


def test_conform_markdown_has_row_for_passing_part(conform):
    ran = conform(SOURCE, "gangline_mine", "--markdown")
    assert ran.returncode == 0, ran.stderr
    *_, row = ran.stdout.strip().splitlines()
    part, suite, claims, passed, failed, _ = (cell.strip() for cell in row.strip("|").split("|"))
    assert (part, suite, claims, failed) == ("track=mine", "TrackerSuite", "", "0")
    assert int(passed) > 10


def test_failing_part_is_named_with_its_test(conform):
    ran = conform(SOURCE.replace("print(self.word,", "print(1 / 0,"))
    assert ran.returncode == 1
    assert "FAILED track=mine test_" in ran.stdout
    assert "ZeroDivisionError" in ran.stdout


def test_conform_reads_claims_from_given_test_file(conform, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from gangline_testkit import TrackerSuite\n\n\n"
        'class TestMine(TrackerSuite):\n    choice = "track=mine"\n    can = {"telepathy"}\n'
    )
    ran = conform(SOURCE, "gangline-mine", "--tests", str(own))
    assert ran.returncode == 1
    assert "telepathy" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gangline-nobody",), "no installed plugin is called gangline-nobody"),
        (("gangline-mine", "--tests", "no.py"), "no file no.py"),
    ],
)
def test_missing_plugin_or_file_is_refused(conform, arguments, message):
    ran = conform(SOURCE, *arguments)
    assert ran.returncode == 2
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr
