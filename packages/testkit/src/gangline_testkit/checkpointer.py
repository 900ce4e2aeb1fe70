"""Conformance suite for checkpointers (`gangline_checkpointers`): save, kill, damage, and load under other layouts."""

from __future__ import annotations

import itertools
import random
import secrets
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from gangline.mesh import Mesh
from gangline.run.attempts import Attempt, append
from gangline_testkit import checkpointer_ranks as ranks, under_fire as fire
from gangline_testkit.checkpointer_ranks import CheckpointerJob, build_registry, make_document
from gangline_testkit.claims import mark_capability
from gangline_testkit.pool import PoolBroken, get_pool
from gangline_testkit.suite import PartSuite

ONE = Mesh.of({})
SHARDED = Mesh.of({"dp_shard": 2})
REPLICATED = Mesh.of({"dp_replicate": 2})
TENSOR = Mesh.of({"tp": 2, "dp_shard": 2})
PIPELINE = Mesh.of({"pp": 2, "dp_shard": 2})

_number = itertools.count()


def _name(mesh: Mesh) -> str:
    return "-".join(f"{axis}{size}" for axis, size in mesh.sizes if size > 1) or "one"


def _format_names(meshes: object) -> str:
    return _name(meshes) if isinstance(meshes, Mesh) else str(meshes)


class CheckpointerSuite(PartSuite):
    """Conformance suite for checkpointers; subclass it with ``choice = "checkpoint=mine"``.

    kills    number of a rank's file changes at which a save is killed; None: at each change
    moments  number of random times at which an asynchronous save is killed
    """

    kills: ClassVar[int | None] = 3
    moments: ClassVar[int] = 4
    CLAIMS: ClassVar[dict[str, str]] = {
        "reshard": "loads under any layout what any other layout saved",
        "atomic": "a kill at any moment leaves whole checkpoints and nothing else to be seen",
        "verify": "notices every changed byte",
        "async": "returns from save before the checkpoint is whole",
        "retention": "with checkpoint.keep_last=N keeps the newest N that can be read, and deletes those before them",
    }

    def get_local_settings(self, directory: Path) -> tuple[str, ...]:
        """Return settings that keep checkpoints in the run directory, if the part would store them elsewhere."""
        return ()

    def make_job(self, directory: Path, mesh: Mesh, large: int = 0, more: tuple[str, ...] = ()) -> CheckpointerJob:
        """Return a job of the checkpointer on a mesh, in a run directory; `more` holds further settings."""
        run = self.run(f"run.dir={directory}", *self.get_local_settings(directory), *more)
        return CheckpointerJob(self.offer.part.build, run, mesh, f"{directory}-{next(_number)}", large)

    def save(self, directory: Path, mesh: Mesh, step: int, salt: int, attempt: int = 1) -> str:
        """Save on all ranks of a mesh, and return the id, which all ranks must agree on."""
        ids = get_pool(mesh.world).run(ranks.save, self.make_job(directory, mesh), step, salt, attempt)
        assert len(set(ids)) == 1, f"ranks disagree about the id: {ids}"
        return ids[0]

    def load(self, directory: Path, mesh: Mesh, id: str, salt: int, names: tuple[str, ...] | None = None) -> None:
        """Load on all ranks of a mesh, and check that every bit is as it was saved."""
        for rank, mismatches in enumerate(
            get_pool(mesh.world).run(ranks.load, self.make_job(directory, mesh), id, salt, names)
        ):
            assert not mismatches, (
                f"rank {rank} of {_name(mesh)} got other values than were saved: {', '.join(mismatches)}"
            )

    def read_as_tool(self, directory: Path) -> tuple[list[str], str | None]:
        """Return (all ids, the latest id) as a tool in another process sees them, after reading every document."""
        return get_pool(1).run(ranks.look_up, self.make_job(directory, ONE))[0][:2]

    def list_as_tool(self, directory: Path) -> tuple[list[str], str | None]:
        """Return (all ids, the latest id) as a tool lists them, without reading checkpoints that may be damaged."""
        return get_pool(1).run(ranks.list_ids, self.make_job(directory, ONE))[0]

    def find_files(self, directory: Path, id: str) -> list[Path]:
        """Return the files of a checkpoint: all files under the run directory whose path contains its id."""
        return sorted(
            path for path in directory.rglob("*") if path.is_file() and id in str(path.relative_to(directory))
        )

    # --- save and load -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("mesh", [ONE, SHARDED, REPLICATED, TENSOR, PIPELINE], ids=_format_names)
    def test_the_same_layout_gets_back_every_bit(self, mesh: Mesh, tmp_path: Path) -> None:
        """Check that arrays of several dtypes load back bit for bit; their shards are overwritten once save returns."""
        id = self.save(tmp_path, mesh, 3, salt=1)
        assert id == "step-00000003"
        self.load(tmp_path, mesh, id, salt=1)

    @mark_capability("reshard")
    @pytest.mark.parametrize(
        ("saved", "loaded"),
        [(SHARDED, ONE), (ONE, SHARDED), (SHARDED, TENSOR), (TENSOR, PIPELINE), (PIPELINE, REPLICATED)],
        ids=_format_names,
    )
    def test_another_layout_gets_back_every_bit(self, saved: Mesh, loaded: Mesh, tmp_path: Path) -> None:
        """Check that another layout, whose boxes match no saved box, loads every bit."""
        id = self.save(tmp_path, saved, 3, salt=1)
        self.load(tmp_path, loaded, id, salt=1)

    def test_weights_alone_can_be_loaded(self, tmp_path: Path) -> None:
        """Check that some weights can be loaded alone, as sampling and export need; the other arrays are no error."""
        id = self.save(tmp_path, SHARDED, 1, salt=1)
        self.load(tmp_path, SHARDED, id, salt=1, names=("model/embed.weight", "model/stack"))

    def test_the_document_comes_back(self, tmp_path: Path) -> None:
        self.save(tmp_path, SHARDED, 1, salt=1)
        _, _, (read,), _ = get_pool(1).run(ranks.look_up, self.make_job(tmp_path, ONE))[0]
        assert read == make_document(1, 1, 1)

    def test_arrays_are_listed_with_their_shapes(self, tmp_path: Path) -> None:
        self.save(tmp_path, SHARDED, 1, salt=1)
        _, _, _, (arrays,) = get_pool(1).run(ranks.look_up, self.make_job(tmp_path, ONE))[0]
        assert arrays == {name: layout.shape for name, layout in build_registry(SHARDED).layouts.items()}

    @mark_capability("reshard")
    def test_a_tool_loads_without_ranks(self, tmp_path: Path) -> None:
        """Check that a checkpoint loads without a store or a process group, as in `gangline sample`."""
        id = self.save(tmp_path, SHARDED, 1, salt=1)
        assert get_pool(1).run(ranks.load_as_tool, self.make_job(tmp_path, ONE), id, 1) == [[]]

    def test_a_missing_array_is_the_users_error(self, tmp_path: Path) -> None:
        id = self.save(tmp_path, SHARDED, 1, salt=1)
        errors = get_pool(2).run(ranks.load_strange, self.make_job(tmp_path, SHARDED), id, "model/absent", (3,))
        assert errors == ["UserError"] * 2

    def test_another_shape_is_the_users_error(self, tmp_path: Path) -> None:
        id = self.save(tmp_path, SHARDED, 1, salt=1)
        errors = get_pool(2).run(ranks.load_strange, self.make_job(tmp_path, SHARDED), id, "model/norm.weight", (8,))
        assert errors == ["UserError"] * 2

    # --- ids and retention -------------------------------------------------------------------------------------------

    def test_an_empty_directory_has_none(self, tmp_path: Path) -> None:
        assert self.read_as_tool(tmp_path) == ([], None)

    def test_checkpoints_are_listed_oldest_first(self, tmp_path: Path) -> None:
        for step in (10, 2, 100):
            self.save(tmp_path, ONE, step, salt=step)
        assert self.read_as_tool(tmp_path) == (["step-00000002", "step-00000010", "step-00000100"], "step-00000100")
        self.load(tmp_path, ONE, "step-00000010", salt=10)

    def test_latest_is_never_of_an_abandoned_branch(self, tmp_path: Path) -> None:
        append(tmp_path, Attempt(1, None))
        for step in (1, 2, 3):
            self.save(tmp_path, ONE, step, salt=step)
        append(tmp_path, Attempt(2, "step-00000001", why="the loss went up"))
        assert self.read_as_tool(tmp_path)[1] == "step-00000001"
        assert self.save(tmp_path, ONE, 2, salt=22, attempt=2) == "step-00000002.2"
        ids, latest = self.read_as_tool(tmp_path)
        assert latest == "step-00000002.2"
        assert set(ids) == {"step-00000001", "step-00000002", "step-00000003", "step-00000002.2"}
        self.load(tmp_path, ONE, "step-00000002", salt=2)
        self.load(tmp_path, ONE, "step-00000002.2", salt=22)

    def test_a_checkpoint_is_never_overwritten(self, tmp_path: Path) -> None:
        """Check that a second save of a step and attempt raises an error and leaves the first checkpoint as it was."""
        id = self.save(tmp_path, SHARDED, 4, salt=1)
        raised = get_pool(2).run(ranks.save_with_error, self.make_job(tmp_path, SHARDED), 4, 2)
        assert all(raised), "a second save of the same step says nothing"
        self.load(tmp_path, SHARDED, id, salt=1)

    @mark_capability("retention")
    def test_what_cannot_be_read_counts_for_nothing(self, tmp_path: Path) -> None:
        """Check that checkpoint.keep_last does not count a truncated checkpoint: the readable one before it is kept."""
        ids = [self.save(tmp_path, SHARDED, step, salt=step) for step in (1, 2, 3)]
        longest = max(self.find_files(tmp_path, ids[2]), key=lambda path: path.stat().st_size)
        with longest.open("r+b") as file:
            file.truncate(longest.stat().st_size // 2)
        job = self.make_job(tmp_path, SHARDED, more=("checkpoint.keep_last=2",))
        (newest, _) = get_pool(2).run(ranks.save, job, 4, 4)
        listed_ids, latest = self.list_as_tool(tmp_path)
        assert latest == newest
        assert ids[1] in listed_ids, f"{ids[2]}, which cannot be read, was counted, and {ids[1]} deleted"
        assert ids[0] not in listed_ids, f"{ids[0]} is none of the newest two, and stays"
        self.load(tmp_path, SHARDED, ids[1], salt=2)
        self.load(tmp_path, SHARDED, newest, salt=4)

    def test_under_another_name_it_is_no_checkpoint(self, tmp_path: Path) -> None:
        """Check that a renamed checkpoint counts as damaged or is not listed, because its contents state its id."""
        id, other = self.save(tmp_path, SHARDED, 3, salt=3), "step-00000007"
        for path in sorted(tmp_path.rglob(f"*{id}*")):
            if path.exists():
                path.rename(path.with_name(path.name.replace(id, other)))
        outcomes = get_pool(2).run(ranks.read_outcome, self.make_job(tmp_path, SHARDED), other, 3)
        kinds = {outcome.partition(":")[0] for outcome in outcomes}
        assert kinds <= {"bad", "gone"}, f"{id} under the name of {other}: {outcomes}"

    # --- failures ----------------------------------------------------------------------------------------------------

    @mark_capability("atomic")
    def test_a_kill_leaves_whole_checkpoints_or_none(self, tmp_path: Path) -> None:
        """Kill a rank just before it changes a file: all listed checkpoints must load, and a new save must work."""
        whole = self.save(tmp_path, SHARDED, 1, salt=1)
        counts = get_pool(2).run(ranks.save_and_die, self.make_job(tmp_path, SHARDED), 2, 2, None, 0)
        assert sum(counts), "the save changed no file that Python can see"
        moments = [(victim, after) for victim, count in enumerate(counts) for after in _spread(count, self.kills)]
        for number, (victim, after) in enumerate(moments):
            step = 10 + number
            with pytest.raises(PoolBroken):
                get_pool(2).run(
                    ranks.save_and_die, self.make_job(tmp_path, SHARDED), step, step, victim, after, grace=0.3
                )
            ids, latest = self.read_as_tool(tmp_path)
            assert whole in ids, f"a kill of rank {victim} before its change {after} took an older checkpoint away"
            for id in ids:
                self.load(tmp_path, SHARDED, id, salt=int(id.removeprefix("step-")))
            assert latest == ids[-1]
        self.load(tmp_path, SHARDED, self.save(tmp_path, SHARDED, 99, salt=99), salt=99)

    @mark_capability("async")
    def test_a_kill_at_any_time_leaves_whole_checkpoints(self, tmp_path: Path) -> None:
        """Kill a rank, its child processes or both during a background save: the newest checkpoint must load."""
        assert "async" in self.can, "what is over when save returns is killed at its changes of files"
        self.save_under_kills(tmp_path, self.moments)

    def save_under_kills(self, directory: Path, moments: int, seed: int | None = None) -> None:
        """Kill saves at random moments; after each, the newest checkpoint must be complete and the next save must work.

        If only a rank's child processes are killed, the save fails on all ranks or on none, and training continues.
        """
        seed = secrets.randbelow(1 << 32) if seed is None else seed
        print(f"seed {seed}")
        draw = random.Random(seed)
        job = self.make_job(directory, SHARDED, large=512)
        seconds = max(get_pool(2).run(fire.measure_save, job, 1))
        salts = {f"step-{step:08d}": step for step in (1, 2, 3)}
        killed = 3  # the step of the save that was killed last
        for number in range(moments):
            whom = draw.choice(("rank", "children", "both"))
            shot = fire.Shot(draw.randrange(2), whom, draw.uniform(0, 1.2) * seconds)
            step = killed + (f"step-{killed:08d}" in self.read_as_tool(directory)[0])  # repeated if it left none
            steps = (step, step + 1, step + 2)
            salts |= {f"step-{one:08d}": one for one in steps}
            try:
                came = get_pool(2).run(fire.save_under_fire, _renew_token(job), salts, steps, shot, grace=0.3)
            except PoolBroken:
                assert whom != "children", f"seed {seed}: {shot} of save {number} ended a rank"
                killed = step + 1
            else:
                assert came[0] == came[1], f"seed {seed}: ranks disagree about save {number}: {came}"
                wrong, *outcomes = came[0]
                assert not wrong, f"seed {seed}: after kill {number} the newest has other values: {wrong}"
                ids = [f"step-{one:08d}" for one in steps]
                assert outcomes in (ids, [ids[0], "SaveFailed", ids[2]]), f"seed {seed}, {shot}: {outcomes}"
                killed = step + 2
            listed_ids, newest = self.read_as_tool(directory)
            print(f"{shot} of saves of {seconds:.3f} s: the newest is {newest} of {steps}")
            assert newest == listed_ids[-1], f"seed {seed}: {newest} of {listed_ids}"
            assert int(newest.removeprefix("step-")) >= step, f"seed {seed}, {shot}: {steps[0]} is gone"
            bad = get_pool(2).run(ranks.load, _renew_token(job), newest, salts[newest])
            assert bad == [[], []], f"seed {seed}, {shot}: {newest} holds other values than were saved: {bad}"

    def test_the_save_that_was_killed_can_be_made_again(self, tmp_path: Path) -> None:
        """Check that the files left by a killed save do not prevent saving its step again."""
        self.save(tmp_path, SHARDED, 1, salt=1)  # creates folders before the counted and the killed saves
        counts = get_pool(2).run(ranks.save_and_die, self.make_job(tmp_path, SHARDED), 2, 2, None, 0)
        for victim, count in enumerate(counts):
            if count:
                job = self.make_job(tmp_path, SHARDED)
                with pytest.raises(PoolBroken):
                    get_pool(2).run(ranks.save_and_die, job, 3 + victim, 7, victim, count // 2, grace=0.3)
                if f"step-{3 + victim:08d}" not in self.read_as_tool(tmp_path)[0]:
                    self.load(tmp_path, SHARDED, self.save(tmp_path, SHARDED, 3 + victim, salt=8), salt=8)

    def test_a_full_disk_fails_the_save_alone(self, tmp_path: Path) -> None:
        """Check that a full disk raises SaveFailed on all ranks, keeps older checkpoints, and allows later saves."""
        job = self.make_job(tmp_path, SHARDED, large=64)
        (id, _) = get_pool(2).run(ranks.save, job, 1, 1)
        errors = get_pool(2).run(ranks.save_on_a_full_disk, _renew_token(job), 2, 2, 4096)
        assert errors == ["SaveFailed"] * 2, f"instead of SaveFailed on both ranks: {errors}"
        assert self.read_as_tool(tmp_path) == ([id], id)
        assert get_pool(2).run(ranks.load, _renew_token(job), id, 1) == [[], []]
        (again, _) = get_pool(2).run(ranks.save, _renew_token(job), 3, 3)
        assert get_pool(2).run(ranks.load, _renew_token(job), again, 3) == [[], []]

    def test_a_lost_file_is_damage_that_is_named(self, tmp_path: Path) -> None:
        """Check that with any one file deleted all ranks raise BadCheckpoint, do not list it, or load right values."""
        id = self.save(tmp_path, SHARDED, 1, salt=1)
        files = [str(path) for path in self.find_files(tmp_path, id)]
        assert files, f"no file under {tmp_path} names {id}"
        per_rank = get_pool(2).run(ranks.lose_each, self.make_job(tmp_path, SHARDED), id, 1, files)
        noticed = 0
        for file, outcomes in zip(files, zip(*per_rank, strict=True), strict=True):
            kinds = {outcome.partition(":")[0] for outcome in outcomes}
            assert kinds in ({"bad"}, {"gone"}, {"right"}), f"without {file}: {outcomes}"
            noticed += kinds != {"right"}
        assert noticed, "no file is needed"

    @mark_capability("verify")
    def test_every_flipped_byte_is_noticed(self, tmp_path: Path) -> None:
        """Check that a flipped bit, in several bytes of each file, is found or has no effect on what is read."""
        id = self.save(tmp_path, ONE, 1, salt=1)
        places = []
        for path in self.find_files(tmp_path, id):
            size = path.stat().st_size
            places += [(str(path), place) for place in sorted({*range(0, size, max(1, size // 12)), size - 1})]
        outcomes = get_pool(1).run(ranks.flip_each, self.make_job(tmp_path, ONE), id, 1, places)[0]
        kinds = [outcome.partition(":")[0] for outcome in outcomes]
        for (file, place), kind, outcome in zip(places, kinds, outcomes, strict=True):
            assert kind in ("bad", "gone", "right"), f"byte {place} of {file} flipped: {outcome}"
        assert "bad" in kinds

    @mark_capability("async")
    def test_save_returns_before_the_checkpoint_is_whole(self, tmp_path: Path) -> None:
        job = self.make_job(tmp_path, SHARDED, large=8192)
        tries = [get_pool(2).run(ranks.watch_save, _renew_token(job), step) for step in (1, 2, 3)]
        assert not all(visible for of_ranks in tries for visible, _, _ in of_ranks), "always whole when save returned"
        assert min(seconds - blocked for of_ranks in tries for _, blocked, seconds in of_ranks) > 0


def _renew_token(job: CheckpointerJob) -> CheckpointerJob:
    """Return the job with new keys in the store."""
    return replace(job, token=f"{job.token}-{next(_number)}")


def _spread(count: int, at_most: int | None) -> list[int]:
    """Return some of the moments 0 to count - 1 (None: all): the last two, around the commit, and others evenly."""
    if at_most is None or count <= at_most:
        return list(range(count))
    return sorted(
        {count - 1, count - 2, *(i * (count - 2) // (at_most - 2) for i in range(at_most - 2))} & {*range(count)}
    )
