"""`gangline ckpt prune`: retention rules, printed deletions, and the last complete checkpoint that stays."""

from __future__ import annotations

import pytest
from made import run_dir, save, small

from gangline.cli.main import main
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline_ckpt_zarr.format.nodes import NAME


@pytest.fixture
def run(tmp_path):
    found = run_dir(tmp_path / "run", durable=tmp_path / "kept", durable_keep_last=1)
    for step in (2, 4, 6, 8):
        save(str(found / "checkpoints" / f"step-{step:08d}"), small(1))
        save(str(tmp_path / "kept" / f"step-{step:08d}"), small(1))
    return found


def left(place) -> list[int]:
    return sorted(int(path.name[5:13]) for path in place.iterdir())


def test_prune_keeps_last_and_every_nth_step(run, capsys):
    assert main(["ckpt", "prune", str(run), "--keep-last", "1", "--keep-every", "4", "--tier", "disk"]) == 0
    out = capsys.readouterr().out
    assert left(run / "checkpoints") == [4, 8]
    assert left(run.parent / "kept") == [2, 4, 6, 8]
    assert f"deleted {run}/checkpoints/step-00000002 (" in out
    assert "disk: deleted 2 of 4 checkpoints, " in out


def test_prune_dry_run_deletes_no_files(run, capsys):
    assert main(["ckpt", "prune", str(run), "--keep-last", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert left(run / "checkpoints") == [2, 4, 6, 8]
    assert [line.split("step-")[1][:8] for line in out.splitlines() if "step-" in line] == ["00000002", "00000004"] * 2
    assert "durable: would delete 2 of 4 checkpoints, " in out


def test_prune_takes_default_counts_from_run_config(run, capsys):
    assert main(["ckpt", "prune", str(run), "--tier", "durable"]) == 0
    assert left(run.parent / "kept") == [8]
    assert main(["ckpt", "prune", str(run)]) == 2
    assert "the number of checkpoints to keep in" in capsys.readouterr().err
    assert left(run / "checkpoints") == [2, 4, 6, 8]


def test_prune_deletes_checkpoints_of_abandoned_branch(run):
    attempts.append(run, Attempt(1, None))
    attempts.append(run, Attempt(2, "step-00000004"))
    assert main(["ckpt", "prune", str(run), "--keep-last", "5"]) == 0
    assert left(run / "checkpoints") == left(run.parent / "kept") == [2, 4]


def test_prune_keeps_last_complete_checkpoint_of_abandoned_branch(run):
    attempts.append(run, Attempt(1, None))
    attempts.append(run, Attempt(2, None, why="from the beginning"))
    assert main(["ckpt", "prune", str(run), "--keep-last", "1"]) == 0
    assert left(run / "checkpoints") == [8]


def test_prune_ignores_unfinished_checkpoint(run):
    (run / "checkpoints" / "step-00000008" / NAME).unlink()
    assert main(["ckpt", "prune", str(run), "--keep-last", "1", "--tier", "disk"]) == 0
    assert left(run / "checkpoints") == [6, 8]


def cut_off(place) -> None:
    """Truncate the largest data file to half of its size; zarr.json stays unchanged."""
    path = max(place.rglob("*.bin"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(place) -> None:
    """Flip one bit of an array."""
    path = max(place.rglob("*.bin"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [cut_off, flip, lambda place: (place / NAME).write_bytes(b"")], ids=["cut off", "flipped", "gone"]
)
def test_prune_does_not_count_damaged_checkpoint(run, damage, capsys):
    """Damage the newest checkpoint, so that the run would resume from the one before it."""
    damage(run / "checkpoints" / "step-00000008")
    assert main(["ckpt", "prune", str(run), "--keep-last", "1", "--tier", "disk"]) == 1
    assert left(run / "checkpoints") == [6, 8]
    out = capsys.readouterr().out
    assert "step-00000008 does not count as kept and is not deleted: " in out
    assert "deleted 2 of 4 checkpoints" in out


def test_prune_stops_if_all_checkpoints_are_damaged(run, capsys):
    for step in (2, 4, 6, 8):
        flip(run / "checkpoints" / f"step-{step:08d}")
    assert main(["ckpt", "prune", str(run), "--keep-last", "1", "--tier", "disk"]) == 1
    assert left(run / "checkpoints") == [2, 4, 6, 8]
    assert "so no checkpoint is deleted" in capsys.readouterr().out


def test_prune_does_not_count_renamed_checkpoint(run, capsys):
    (run / "checkpoints" / "step-00000002").rename(run / "checkpoints" / "step-00000010")
    assert main(["ckpt", "verify", str(run), "step-00000010"]) == 1
    assert "zarr.json belongs to checkpoint step-00000002" in capsys.readouterr().out
    assert main(["ckpt", "ls", str(run), "--tier", "disk"]) == 1
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines() if "step-00000010 " in line] == ["damaged"]
    assert [line.split()[1] for line in out.splitlines() if "newest" in line] == ["step-00000008"]
    assert main(["ckpt", "prune", str(run), "--keep-last", "1", "--tier", "disk"]) == 1
    assert left(run / "checkpoints") == [8, 10]


def test_prune_keeps_checkpoint_of_unrecorded_attempt(run):
    """Leave out attempts.jsonl: without it, no branch is known to be abandoned."""
    save(str(run / "checkpoints" / "step-00000009.2"), small(1))
    assert main(["ckpt", "prune", str(run), "--keep-last", "1", "--tier", "disk"]) == 0
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000008", "step-00000009.2"]


def test_prune_deletes_zarr_json_first(run, monkeypatch, capsys):
    """Check that a deletion that fails midway leaves no zarr.json, so that no partial checkpoint is visible."""
    from gangline_ckpt_zarr.stores import local

    def dies(place):
        raise OSError(5, "Input/output error", str(place))

    monkeypatch.setattr(local, "_remove_tree", dies)
    assert main(["ckpt", "prune", str(run), "--keep-last", "3", "--tier", "disk"]) == 2
    assert "Input/output error" in capsys.readouterr().err
    assert not (run / "checkpoints" / "step-00000002" / NAME).exists()
    assert (run / "checkpoints" / "step-00000004" / NAME).exists()


@pytest.mark.parametrize("flags", [["--keep-last", "0"], ["--keep-last", "1", "--keep-every", "-2"]])
def test_prune_refuses_counts_below_one(run, flags, capsys):
    assert main(["ckpt", "prune", str(run), *flags]) == 2
    assert "expected 1 or more" in capsys.readouterr().err


def test_prune_requires_run_directory(run, capsys):
    assert main(["ckpt", "prune", str(run.parent / "kept"), "--keep-last", "1"]) == 2
    assert "is not a run directory" in capsys.readouterr().err
