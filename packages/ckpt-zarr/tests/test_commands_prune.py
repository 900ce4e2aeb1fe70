"""`gangline ckpt prune` deletes what the rules do not keep, says so, and never the last whole checkpoint."""

from __future__ import annotations

import pytest
from made import run_dir, save, small

from gangline import attempts
from gangline.attempts import Attempt
from gangline.cli.main import main
from gangline_ckpt_zarr.format.metadata import NAME


@pytest.fixture
def run(tmp_path):
    found = run_dir(tmp_path / "run", durable=tmp_path / "kept", durable_keep_last=1)
    for step in (2, 4, 6, 8):
        save(str(found / "checkpoints" / f"step-{step:08d}"), small(1))
        save(str(tmp_path / "kept" / f"step-{step:08d}"), small(1))
    return found


def left(place) -> list[int]:
    return sorted(int(path.name[5:13]) for path in place.iterdir())


def test_the_newest_and_those_of_every_so_many_steps_stay(run, capsys):
    assert main(["ckpt", "prune", str(run), "--keep-last", "1", "--keep-every", "4", "--tier", "disk"]) == 0
    out = capsys.readouterr().out
    assert left(run / "checkpoints") == [4, 8]
    assert left(run.parent / "kept") == [2, 4, 6, 8]
    assert f"deleted {run}/checkpoints/step-00000002 (" in out
    assert "disk: deleted 2 of 4 checkpoints, " in out


def test_a_dry_run_only_says_it(run, capsys):
    assert main(["ckpt", "prune", str(run), "--keep-last", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert left(run / "checkpoints") == [2, 4, 6, 8]
    assert [line.split("step-")[1][:8] for line in out.splitlines() if "step-" in line] == ["00000002", "00000004"] * 2
    assert "durable: would delete 2 of 4 checkpoints, " in out


def test_the_run_s_own_rules_are_the_default(run, capsys):
    assert main(["ckpt", "prune", str(run), "--tier", "durable"]) == 0
    assert left(run.parent / "kept") == [8]
    assert main(["ckpt", "prune", str(run)]) == 2
    assert "nothing says how many checkpoints to keep" in capsys.readouterr().err
    assert left(run / "checkpoints") == [2, 4, 6, 8]


def test_what_an_abandoned_branch_left_goes(run):
    attempts.append(run, Attempt(1, None))
    attempts.append(run, Attempt(2, "step-00000004"))
    assert main(["ckpt", "prune", str(run), "--keep-last", "5"]) == 0
    assert left(run / "checkpoints") == left(run.parent / "kept") == [2, 4]


def test_the_last_whole_one_stays_even_where_its_branch_was_abandoned(run):
    attempts.append(run, Attempt(1, None))
    attempts.append(run, Attempt(2, None, why="from the beginning"))
    assert main(["ckpt", "prune", str(run), "--keep-last", "1"]) == 0
    assert left(run / "checkpoints") == [8]


def test_an_unfinished_one_counts_for_nothing_and_is_left_alone(run):
    (run / "checkpoints" / "step-00000008" / NAME).unlink()
    assert main(["ckpt", "prune", str(run), "--keep-last", "1", "--tier", "disk"]) == 0
    assert left(run / "checkpoints") == [6, 8]


def test_a_whole_checkpoint_is_gone_at_once(run, monkeypatch, capsys):
    """Its zarr.json is the first to go: what is half deleted is no checkpoint."""
    from gangline_ckpt_zarr.stores import local

    def dies(place):
        raise OSError(5, "Input/output error", str(place))

    monkeypatch.setattr(local, "_remove_tree", dies)
    assert main(["ckpt", "prune", str(run), "--keep-last", "3", "--tier", "disk"]) == 2
    assert "Input/output error" in capsys.readouterr().err
    assert not (run / "checkpoints" / "step-00000002" / NAME).exists()
    assert (run / "checkpoints" / "step-00000004" / NAME).exists()


@pytest.mark.parametrize("flags", [["--keep-last", "0"], ["--keep-last", "1", "--keep-every", "-2"]])
def test_numbers_that_would_keep_none_are_refused(run, flags, capsys):
    assert main(["ckpt", "prune", str(run), *flags]) == 2
    assert "expected 1 or more" in capsys.readouterr().err


def test_without_the_run_nobody_knows_what_was_abandoned(run, capsys):
    assert main(["ckpt", "prune", str(run.parent / "kept"), "--keep-last", "1"]) == 2
    assert "is no run directory" in capsys.readouterr().err
