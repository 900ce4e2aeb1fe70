"""`gangline ckpt ls` and `show`: states, tiers, document, arrays, and path forms of a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from made import run_dir, save, small

from gangline.cli.main import main
from gangline.errors import UserError
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline_ckpt_zarr.commands import VERBS, text
from gangline_ckpt_zarr.commands.where import find_place, find_places
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.stores.open import open_store

DOCUMENT = {"step": 12, "attempt": 1, "cursor": 48, "tokens": 3072, "seed": 5, "parts": {"model": {"part": "tiny"}}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run with complete, unfinished and abandoned checkpoints in two tiers."""
    root = tmp_path_factory.mktemp("runs")
    found = run_dir(root / "a", durable=root / "kept")
    for name in ("step-00000004", "step-00000008", "step-00000012.2"):
        save(str(found / "checkpoints" / name), small(), document=DOCUMENT)
    save(str(root / "kept" / "step-00000004"), small(), document=DOCUMENT)
    save(str(root / "kept" / "step-00000012.2"), small(), document=DOCUMENT)
    (root / "kept" / "step-00000012.2" / NAME).unlink()
    (found / "checkpoints" / "step-00000016.2" / "data-0badcafe").mkdir(parents=True)
    attempts.append(found, Attempt(1, None))
    attempts.append(found, Attempt(2, "step-00000004", why="a test"))
    return found


def rows(out: str) -> dict[str, list[str]]:
    """Return the cells of each row of `ckpt ls`, by checkpoint id."""
    found = [line.split("  ") for line in out.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in found]
    return {row[1]: row for row in cells if len(row) > 1}


def test_ls_reports_tiers_and_states(run, capsys):
    assert main(["ckpt", "ls", str(run)]) == 0
    out = capsys.readouterr().out
    found = rows(out)
    assert found["step-00000004"][4:] == ["disk, durable", "complete"]
    assert found["step-00000008"][4:] == ["disk", "abandoned"]
    assert found["step-00000012.2"][4:] == ["disk, durable (unfinished)", "complete, newest"]
    assert found["step-00000016.2"][2:] == ["0 B", "disk", "unfinished"]
    assert [row[0] for row in found.values()][1:] == ["4", "8", "12", "16"]
    assert out.splitlines()[-1].startswith("4 checkpoints, ")


def test_ls_reports_stored_bytes(run, capsys):
    main(["ckpt", "ls", str(run), "--tier", "durable"])
    out = capsys.readouterr().out
    place = run.parent / "kept" / "step-00000004"
    nbytes = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    assert rows(out)["step-00000004"][2] == text.size(nbytes)
    assert "step-00000008" not in out


def test_ls_of_a_url_needs_no_run(capsys):
    save(open_store("memory://ls/step-00000003"), small())
    assert main(["ckpt", "ls", "memory://ls"]) == 0
    assert rows(capsys.readouterr().out)["step-00000003"][4:] == ["store", "complete, newest"]


def test_ls_of_run_without_checkpoints_succeeds(tmp_path, capsys):
    assert main(["ckpt", "ls", str(run_dir(tmp_path / "new"))]) == 0
    assert "no checkpoints found in" in capsys.readouterr().out


def test_ls_and_show_avoid_heavy_imports_and_reads(run):
    """Check that `ls` and `show` read each zarr.json once and no array, and import neither torch nor numpy."""
    program = """
import builtins, io, os, sys
from gangline.cli.main import main
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
assert main(["ckpt", "ls", sys.argv[1]]) == 0
assert len([path for path in opened if path.endswith("zarr.json")]) == 4, opened
assert not [path for path in opened if path.endswith(".bin")], opened
opened.clear()
assert main(["ckpt", "show", sys.argv[1], "step-00000004"]) == 0
assert len([path for path in opened if path.endswith("zarr.json")]) == 1
assert not {"torch", "numpy", "rich", "fsspec", "zarr", "hydra"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_show_summarizes_document_and_arrays(run, capsys):
    assert main(["ckpt", "show", str(run)]) == 0
    out = capsys.readouterr().out
    head, tree = out.split("\n\n")
    said = dict(line.split(None, 1) for line in head.splitlines())
    assert said["checkpoint"] == f"{run}/checkpoints/step-00000012.2"
    assert (said["step"], said["tokens"], said["cursor"]) == ("12", "3,072", "48")
    assert said["mesh"] == "dp_shard 2 × tp 2"
    assert said["parts"] == "model=tiny"
    cells = {line.split()[0]: line.split() for line in tree.splitlines()}
    alike = cells["blocks.0-1.w"]
    assert alike[1:6] == ["(2)", "60×32", "float32", "30×32", "4"]
    assert cells["half"][2:5] == ["bfloat16", "as", "float32"]
    assert tree.count("rows over dp_shard (2)") == 2
    assert cells["bias"][-2:] == ["not", "sharded"]


def test_show_with_each_prints_line_per_array(run, capsys):
    assert main(["ckpt", "show", str(run), "--each"]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.split("\n\n")[1].splitlines()[1:]]
    assert lines == [
        *("model", "blocks.0.w", "blocks.1.w", "columns", "half", "bias"),
        *("optimizer", "exp_avg", "blocks.0.w", "state", "count", "mask"),
    ]


def test_show_document_is_json(run, capsys):
    assert main(["ckpt", "show", str(run), "step-00000008", "--document"]) == 0
    assert json.loads(capsys.readouterr().out) == {**DOCUMENT, "step": 8, "attempt": 1}


def test_show_names_the_other_copies(run, capsys):
    main(["ckpt", "show", str(run), "step-00000004"])
    assert f"also in    {run.parent}/kept/step-00000004" in capsys.readouterr().out


def test_checkpoint_is_found_by_every_path_form(run):
    inside = str(run / "checkpoints" / "step-00000008")
    for words in (
        [str(run), "step-00000008"],
        [f"{run}/step-00000008"],
        [inside],
        [inside + "/"],
        [f"file://{inside}"],
        [str(run / "checkpoints"), "step-00000008"],
    ):
        copy = find_place(words).copy()
        assert (copy.name, copy.store.url) == ("step-00000008", inside)
    assert find_place([str(run)]).copy().name == find_place([str(run / "checkpoints")]).copy().name == "step-00000012.2"
    assert find_place([str(run.parent / "kept")]).copy().name == "step-00000004"
    two = find_places([str(run), "step-00000004", "step-00000008"])
    assert [place.copy().name for place in two] == ["step-00000004", "step-00000008"]


def test_checkpoint_is_found_by_relative_path(run, monkeypatch):
    monkeypatch.chdir(run)
    assert find_place(["."]).copy().name == find_place(["checkpoints"]).copy().name == "step-00000012.2"
    assert find_place(["./step-00000008"]).copy().name == "step-00000008"
    monkeypatch.chdir(run / "checkpoints")
    assert find_place(["step-00000008"]).copy().name == "step-00000008"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["step-00000003"], "no run directory is given for checkpoint step-00000003"),
        (["{run}", "step-00000003"], "no checkpoint step-00000003 found in"),
        (["{run}/checkpoints/step-00000016.2"], "is not a complete checkpoint"),
        (["{run}", "{run}"], "expected one checkpoint"),
        (["{run}", "--tier", "moon"], "--tier moon: "),
        (["carrier-pigeon://x"], "carrier-pigeon:// is not a known kind of store"),
    ],
)
def test_show_reports_invalid_argument_in_one_message(run, words, said, capsys):
    assert main(["ckpt", "show", *(word.replace("{run}", str(run)) for word in words)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_ls_refuses_checkpoints_of_another_checkpointer(tmp_path, capsys):
    from gangline.config.compose import compose_one
    from gangline.run.directory import RunDirectory

    RunDirectory.create(compose_one(["recipe=tiny", "checkpoint=torch", f"run.dir={tmp_path / 'a'}"])).unlock()
    assert main(["ckpt", "ls", str(tmp_path / "a")]) == 2
    assert "checkpoint=torch" in capsys.readouterr().err


def test_tier_path_is_resolved_from_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KEPT_IN", str(tmp_path / "kept"))
    run = run_dir(tmp_path / "a", path="'${oc.env:KEPT_IN}'")
    save(str(tmp_path / "kept" / "step-00000001"), small())
    assert find_place([str(run)]).copy().store.url == str(tmp_path / "kept" / "step-00000001")


def test_commands_include_memory_tier(tmp_path, monkeypatch, capsys):
    from gangline_ckpt_zarr.tiers import places

    monkeypatch.setattr(places, "ROOT", tmp_path / "shm")
    run = run_dir(tmp_path / "a", memory_every=1)
    assert main(["ckpt", "ls", str(run)]) == 0
    assert "no checkpoints found in" in capsys.readouterr().out
    for place in (places.locate_node(run), run / "checkpoints"):
        save(str(place / "step-00000001"), small())
    assert main(["ckpt", "ls", str(run)]) == 0
    assert rows(capsys.readouterr().out)["step-00000001"][4:] == ["disk, memory", "complete, newest"]
    assert find_place([str(run)]).copy().store.url == f"{run}/checkpoints/step-00000001"
    assert find_place([str(run)]).select_tier("memory").copy().store.url == str(
        places.locate_node(run) / "step-00000001"
    )
    assert main(["ckpt", "verify", str(run), "--all"]) == 0
    assert "1 copy: all good" in capsys.readouterr().out


def test_keeper_sidecar_does_not_import_torch():
    program = "import gangline_ckpt_zarr.tiers.keeper, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_help_lists_every_command(capsys):
    assert main(["ckpt"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {verb} " in out for verb in VERBS)
    assert main(["ckpt", "shw"]) == 2
    assert "Did you mean show?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_help(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", verb, "--help"])
    assert ended.value.code == 0
    assert f"gangline ckpt {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234567, "1.23 MB"), (123456789, "123 MB"), (2e15, "2000 TB")],
)
def test_size_is_formatted_with_unit(nbytes, said):
    assert text.size(nbytes) == said


@pytest.mark.parametrize(("seconds", "said"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (2e5, "2 d")])
def test_age_is_formatted_with_unit(seconds, said):
    assert text.format_age(seconds) == said


def test_directory_without_checkpoint_is_refused(tmp_path):
    os.mkdir(tmp_path / "empty")
    with pytest.raises(UserError, match="no complete checkpoint found in"):
        find_place([str(tmp_path / "empty")]).copy()
