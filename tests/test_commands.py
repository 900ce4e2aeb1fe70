"""Help text of every command and subcommand of every package."""

from __future__ import annotations

import re

from reference_commands import list_inner

from gangline.cli.main import main
from gangline.plugin.registry import installed


def helped(words: list[str], capsys) -> str:
    try:
        code = main([*words, "--help"])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert (code, said.err) == (0, ""), f"gangline {' '.join(words)} --help: {said.err}"
    return said.out


def test_every_command_and_subcommand_has_help(capsys):
    found = []
    for verb in installed().get_commands():
        page = helped([verb], capsys)
        assert re.match(rf"usage: gangline {verb}\b", page)
        for second in dict.fromkeys(list_inner(verb, page)):
            own = helped([verb, second], capsys)
            assert re.search(rf"gangline {verb} {second}\b", own), own
            found.append(f"{verb} {second}")
    assert {"parallel draw", "parallel explain", "moe report", "ckpt ls", "ckpt prune", "ckpt import"} <= set(found)
