"""Command-line flags of subcommands mixed with overrides of a run."""

from __future__ import annotations

import pytest

from gangline import UserError
from gangline_basics.flags import Flags


def make_flags() -> Flags:
    flags = Flags("thing show", "Show it.")
    flags.add_argument("words", nargs="*", metavar="OVERRIDE", help="of train")
    flags.add_argument("--json", action="store_true", help="as JSON")
    flags.add_number("--tokens", "15e12", "number of tokens")
    flags.add_number("--rounds", "3", "number of rounds", integer=True, default=3)
    return flags


def test_flags_and_overrides_are_mixed():
    asked = make_flags().read(["a=1", "--tokens", "2e3", "b=[2]", "--json", "c"])
    assert (asked.words, asked.tokens, asked.json, asked.rounds) == (["a=1", "b=[2]", "c"], 2000.0, True, 3)
    assert make_flags().read(["--rounds=4"]).rounds == 4


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        make_flags().read(["a=1", "--help"])
    page = capsys.readouterr().out
    assert ended.value.code == 0
    assert page.startswith("usage: gangline thing show ")
    assert all(
        text in page for text in ("--json", "as JSON", "--tokens N", "number of tokens", "--rounds N", "OVERRIDE")
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--tokens", "--tokens needs a value."),
        (
            "--token 3",
            "there is no flag --token.\n  Did you mean --tokens?\n  Flags: --help, --json, --tokens, --rounds.",
        ),
        ("--tokens lots", "--tokens lots: expected a number above 0.\n  Example:  --tokens 15e12"),
        ("--tokens=nan", "--tokens nan: expected a number above 0.\n  Example:  --tokens 15e12"),
        ("--tokens 1e400", "--tokens 1e400: expected a number between 1e-24 and 1e+24."),
        ("--rounds 2.5", "--rounds 2.5: expected an integer."),
        ("--json=yes", "--json: ignored explicit argument 'yes'."),
    ],
)
def test_invalid_flag_gives_one_message(argv, message):
    with pytest.raises(UserError) as caught:
        make_flags().read(argv.split())
    assert str(caught.value) == message


def test_wrong_argument_count_shows_usage():
    flags = Flags("thing show", "Show it.")
    flags.add_argument("run_dir", metavar="RUN_DIR")
    messages = (([], "the following arguments are required: RUN_DIR."), (["a", "b"], "unexpected argument b."))
    for argv, message in messages:
        with pytest.raises(UserError) as caught:
            flags.read(argv)
        assert str(caught.value) == f"{message}\n  usage: gangline thing show [-h] RUN_DIR"
