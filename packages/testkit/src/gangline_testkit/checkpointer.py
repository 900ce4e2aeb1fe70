"""Conformance suite for checkpointers (hook `gangline_checkpointers`): saves, loads, resharding, kills and damage."""

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

    kills    number of saves to kill per rank, each before a different file change of the rank; None: one per change
    moments  number of asynchronous saves that are killed, each at a random time
    """

    kills: ClassVar[int | None] = 3
    moments: ClassVar[int] = 4
    CLAIMS: ClassVar[dict[str, str]] = {
        "reshard": "Every layout loads the checkpoints of every other layout.",
        "atomic": "After a kill at any moment, only complete checkpoints are listed.",
        "verify": "Every changed byte is detected, or has no effect on loaded values.",
        "async": "`save` returns before the checkpoint is visible.",
        "retention": "checkpoint.keep_last=N keeps the newest N readable checkpoints and deletes older checkpoints.",
    }

    def get_local_settings(self, directory: Path) -> tuple[str, ...]:
        """Return settings that move checkpoints into `directory`, for a part that stores them elsewhere by default."""
        return ()

    def make_job(self, directory: Path, mesh: Mesh, large: int = 0, more: tuple[str, ...] = ()) -> CheckpointerJob:
        """Return a job of the checkpointer on a mesh. directory: run directory; large: as in `CheckpointerJob`."""
        run = self.run(f"run.dir={directory}", *self.get_local_settings(directory), *more)
        return CheckpointerJob(self.offer.part.build, run, mesh, f"{directory}-{next(_number)}", large)

    def save(self, directory: Path, mesh: Mesh, step: int, salt: int, attempt: int = 1) -> str:
        """Save on all ranks of a mesh, and return the id, which must be equal on all ranks."""
        ids = get_pool(mesh.world).run(ranks.save, self.make_job(directory, mesh), step, salt, attempt)
        assert len(set(ids)) == 1, f"`save` returned different ids on the ranks: {ids}"
        return ids[0]

    def load(self, directory: Path, mesh: Mesh, id: str, salt: int, names: tuple[str, ...] | None = None) -> None:
        """Load on all ranks of a mesh, and check that every shard has the saved bits."""
        for rank, mismatches in enumerate(
            get_pool(mesh.world).run(ranks.load, self.make_job(directory, mesh), id, salt, names)
        ):
            assert not mismatches, (
                f"rank {rank} of mesh {_name(mesh)} loaded other values than were saved: {', '.join(mismatches)}"
            )

    def read_as_tool(self, directory: Path) -> tuple[list[str], str | None]:
        """Return (all ids, the latest id) in a process without a process group, which also reads every document."""
        return get_pool(1).run(ranks.look_up, self.make_job(directory, ONE))[0][:2]

    def list_as_tool(self, directory: Path) -> tuple[list[str], str | None]:
        """Return (all ids, the latest id) in a process without a process group, without reading any checkpoint."""
        return get_pool(1).run(ranks.list_ids, self.make_job(directory, ONE))[0]

    def find_files(self, directory: Path, id: str) -> list[Path]:
        """Return the files of a checkpoint: all files under the run directory whose path contains its id."""
        return sorted(
            path for path in directory.rglob("*") if path.is_file() and id in str(path.relative_to(directory))
        )

    # --- save and load -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("mesh", [ONE, SHARDED, REPLICATED, TENSOR, PIPELINE], ids=_format_names)
    def test_same_layout_loads_every_bit(self, mesh: Mesh, tmp_path: Path) -> None:
        """Check that arrays of several dtypes load bit for bit, although the shards are overwritten after `save`."""
        id = self.save(tmp_path, mesh, 3, salt=1)
        assert id == "step-00000003"
        self.load(tmp_path, mesh, id, salt=1)

    @mark_capability("reshard")
    @pytest.mark.parametrize(
        ("saved", "loaded"),
        [(SHARDED, ONE), (ONE, SHARDED), (SHARDED, TENSOR), (TENSOR, PIPELINE), (PIPELINE, REPLICATED)],
        ids=_format_names,
    )
    def test_other_layout_loads_every_bit(self, saved: Mesh, loaded: Mesh, tmp_path: Path) -> None:
        """Check that another layout, with boxes that differ from the saved boxes, loads every bit."""
        id = self.save(tmp_path, saved, 3, salt=1)
        self.load(tmp_path, loaded, id, salt=1)

    def test_some_weights_can_be_loaded_alone(self, tmp_path: Path) -> None:
        """Check that a load of some weights ignores all other arrays of the checkpoint, as sampling and export need."""
        id = self.save(tmp_path, SHARDED, 1, salt=1)
        self.load(tmp_path, SHARDED, id, salt=1, names=("model/embed.weight", "model/stack"))

    def test_document_is_read_back_unchanged(self, tmp_path: Path) -> None:
        self.save(tmp_path, SHARDED, 1, salt=1)
        _, _, (read,), _ = get_pool(1).run(ranks.look_up, self.make_job(tmp_path, ONE))[0]
        assert read == make_document(1, 1, 1)

    def test_arrays_are_listed_with_their_shapes(self, tmp_path: Path) -> None:
        self.save(tmp_path, SHARDED, 1, salt=1)
        _, _, _, (arrays,) = get_pool(1).run(ranks.look_up, self.make_job(tmp_path, ONE))[0]
        assert arrays == {name: layout.shape for name, layout in build_registry(SHARDED).layouts.items()}

    @mark_capability("reshard")
    def test_tool_loads_without_a_process_group(self, tmp_path: Path) -> None:
        """Check that a checkpoint loads without a job store and a process group, as in `gangline sample`."""
        id = self.save(tmp_path, SHARDED, 1, salt=1)
        assert get_pool(1).run(ranks.load_as_tool, self.make_job(tmp_path, ONE), id, 1) == [[]]

    def test_missing_array_is_a_user_error(self, tmp_path: Path) -> None:
        id = self.save(tmp_path, SHARDED, 1, salt=1)
        errors = get_pool(2).run(ranks.load_strange, self.make_job(tmp_path, SHARDED), id, "model/absent", (3,))
        assert errors == ["UserError"] * 2

    def test_other_array_shape_is_a_user_error(self, tmp_path: Path) -> None:
        id = self.save(tmp_path, SHARDED, 1, salt=1)
        errors = get_pool(2).run(ranks.load_strange, self.make_job(tmp_path, SHARDED), id, "model/norm.weight", (8,))
        assert errors == ["UserError"] * 2

    # --- ids and retention -------------------------------------------------------------------------------------------

    def test_empty_directory_has_no_checkpoint(self, tmp_path: Path) -> None:
        assert self.read_as_tool(tmp_path) == ([], None)

    def test_checkpoints_are_listed_oldest_first(self, tmp_path: Path) -> None:
        for step in (10, 2, 100):
            self.save(tmp_path, ONE, step, salt=step)
        assert self.read_as_tool(tmp_path) == (["step-00000002", "step-00000010", "step-00000100"], "step-00000100")
        self.load(tmp_path, ONE, "step-00000010", salt=10)

    def test_latest_skips_an_abandoned_branch(self, tmp_path: Path) -> None:
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

    def test_checkpoint_is_never_overwritten(self, tmp_path: Path) -> None:
        """Check that a second save of a step and attempt raises an error and does not change the first checkpoint."""
        id = self.save(tmp_path, SHARDED, 4, salt=1)
        raised = get_pool(2).run(ranks.save_with_error, self.make_job(tmp_path, SHARDED), 4, 2)
        assert all(raised), "a second save of the same step and attempt raises no error"
        self.load(tmp_path, SHARDED, id, salt=1)

    @mark_capability("retention")
    def test_keep_last_does_not_count_a_damaged_checkpoint(self, tmp_path: Path) -> None:
        """Check that keep_last=2 does not count a truncated checkpoint, and keeps the readable checkpoint before it."""
        ids = [self.save(tmp_path, SHARDED, step, salt=step) for step in (1, 2, 3)]
        longest = max(self.find_files(tmp_path, ids[2]), key=lambda path: path.stat().st_size)
        with longest.open("r+b") as file:
            file.truncate(longest.stat().st_size // 2)
        job = self.make_job(tmp_path, SHARDED, more=("checkpoint.keep_last=2",))
        (newest, _) = get_pool(2).run(ranks.save, job, 4, 4)
        listed_ids, latest = self.list_as_tool(tmp_path)
        assert latest == newest
        assert ids[1] in listed_ids, f"keep_last=2 counted the unreadable {ids[2]} and deleted the readable {ids[1]}"
        assert ids[0] not in listed_ids, f"keep_last=2 did not delete {ids[0]}, the third newest readable checkpoint"
        self.load(tmp_path, SHARDED, ids[1], salt=2)
        self.load(tmp_path, SHARDED, newest, salt=4)

    def test_renamed_checkpoint_is_damaged_or_not_listed(self, tmp_path: Path) -> None:
        """Check that a renamed checkpoint is reported as damaged or not listed, because its contents state its id."""
        id, other = self.save(tmp_path, SHARDED, 3, salt=3), "step-00000007"
        for path in sorted(tmp_path.rglob(f"*{id}*")):
            if path.exists():
                path.rename(path.with_name(path.name.replace(id, other)))
        outcomes = get_pool(2).run(ranks.read_outcome, self.make_job(tmp_path, SHARDED), other, 3)
        kinds = {outcome.partition(":")[0] for outcome in outcomes}
        assert kinds <= {"bad", "gone"}, f"{id}, renamed to {other}, must be damaged or not listed: {outcomes}"

    # --- failures ----------------------------------------------------------------------------------------------------

    @mark_capability("atomic")
    def test_kill_before_any_file_change_leaves_complete_checkpoints(self, tmp_path: Path) -> None:
        """Kill a rank before a file change, then check that all listed checkpoints load and a new save succeeds."""
        whole = self.save(tmp_path, SHARDED, 1, salt=1)
        counts = get_pool(2).run(ranks.save_and_die, self.make_job(tmp_path, SHARDED), 2, 2, None, 0)
        assert sum(counts), "the audit hook saw no file change of the save under run.dir"
        moments = [(victim, after) for victim, count in enumerate(counts) for after in _spread(count, self.kills)]
        for number, (victim, after) in enumerate(moments):
            step = 10 + number
            with pytest.raises(PoolBroken):
                get_pool(2).run(
                    ranks.save_and_die, self.make_job(tmp_path, SHARDED), step, step, victim, after, grace=0.3
                )
            ids, latest = self.read_as_tool(tmp_path)
            assert whole in ids, (
                f"after a kill of rank {victim} before its file change {after}, an older checkpoint is missing"
            )
            for id in ids:
                self.load(tmp_path, SHARDED, id, salt=int(id.removeprefix("step-")))
            assert latest == ids[-1]
        self.load(tmp_path, SHARDED, self.save(tmp_path, SHARDED, 99, salt=99), salt=99)

    @mark_capability("async")
    def test_kill_during_async_save_leaves_complete_checkpoints(self, tmp_path: Path) -> None:
        """Kill a rank, its child processes or both during an async save; then the newest checkpoint must load."""
        assert "async" in self.can, "without the claim async, the claim atomic tests kills during a save"
        self.save_under_kills(tmp_path, self.moments)

    def save_under_kills(self, directory: Path, moments: int, seed: int | None = None) -> None:
        """Kill saves at random moments, and check that the newest checkpoint loads and that the next save succeeds.

        If only child processes of a rank are killed, the save must fail on all ranks or succeed on all ranks.
        """
        seed = secrets.randbelow(1 << 32) if seed is None else seed
        print(f"seed {seed}")
        draw = random.Random(seed)
        job = self.make_job(directory, SHARDED, large=512)
        seconds = max(get_pool(2).run(fire.measure_save, job, 1))
        salts = {f"step-{step:08d}": step for step in (1, 2, 3)}
        killed = 3  # step of the last killed save
        for number in range(moments):
            whom = draw.choice(("rank", "children", "both"))
            shot = fire.Shot(draw.randrange(2), whom, draw.uniform(0, 1.2) * seconds)
            # If the killed save left no checkpoint, its step is saved again.
            step = killed + (f"step-{killed:08d}" in self.read_as_tool(directory)[0])
            steps = (step, step + 1, step + 2)
            salts |= {f"step-{one:08d}": one for one in steps}
            try:
                came = get_pool(2).run(fire.save_under_fire, _renew_token(job), salts, steps, shot, grace=0.3)
            except PoolBroken:
                assert whom != "children", f"seed {seed}: {shot} during save {number} ended a rank"
                killed = step + 1
            else:
                assert came[0] == came[1], f"seed {seed}: save {number} has different outcomes on the two ranks: {came}"
                wrong, *outcomes = came[0]
                assert not wrong, f"seed {seed}: before save {number} the newest checkpoint holds wrong values: {wrong}"
                ids = [f"step-{one:08d}" for one in steps]
                assert outcomes in (ids, [ids[0], "SaveFailed", ids[2]]), (
                    f"seed {seed}, {shot}: saves returned {outcomes}, expected {ids} or SaveFailed for the second"
                )
                killed = step + 2
            listed_ids, newest = self.read_as_tool(directory)
            print(f"{shot} (a save takes {seconds:.3f} s): the newest checkpoint is {newest}, steps saved: {steps}")
            assert newest == listed_ids[-1], (
                f"seed {seed}: find_latest returns {newest}, and the newest listed id is {listed_ids[-1]}"
            )
            assert int(newest.removeprefix("step-")) >= step, (
                f"seed {seed}, {shot}: the checkpoint of step {steps[0]} is missing"
            )
            bad = get_pool(2).run(ranks.load, _renew_token(job), newest, salts[newest])
            assert bad == [[], []], f"seed {seed}, {shot}: {newest} has other values than were saved: {bad}"

    def test_killed_save_can_be_repeated(self, tmp_path: Path) -> None:
        """Check that files left by a killed save do not prevent a new save of the same step."""
        self.save(tmp_path, SHARDED, 1, salt=1)  # so that the folders exist before file changes are counted
        counts = get_pool(2).run(ranks.save_and_die, self.make_job(tmp_path, SHARDED), 2, 2, None, 0)
        for victim, count in enumerate(counts):
            if count:
                job = self.make_job(tmp_path, SHARDED)
                with pytest.raises(PoolBroken):
                    get_pool(2).run(ranks.save_and_die, job, 3 + victim, 7, victim, count // 2, grace=0.3)
                if f"step-{3 + victim:08d}" not in self.read_as_tool(tmp_path)[0]:
                    self.load(tmp_path, SHARDED, self.save(tmp_path, SHARDED, 3 + victim, salt=8), salt=8)

    def test_full_disk_fails_only_the_current_save(self, tmp_path: Path) -> None:
        """Check that a full disk raises SaveFailed on all ranks, and that older and later checkpoints load."""
        job = self.make_job(tmp_path, SHARDED, large=64)
        (id, _) = get_pool(2).run(ranks.save, job, 1, 1)
        errors = get_pool(2).run(ranks.save_on_a_full_disk, _renew_token(job), 2, 2, 4096)
        assert errors == ["SaveFailed"] * 2, f"expected SaveFailed on both ranks, got {errors}"
        assert self.read_as_tool(tmp_path) == ([id], id)
        assert get_pool(2).run(ranks.load, _renew_token(job), id, 1) == [[], []]
        (again, _) = get_pool(2).run(ranks.save, _renew_token(job), 3, 3)
        assert get_pool(2).run(ranks.load, _renew_token(job), again, 3) == [[], []]

    def test_lost_file_is_reported_on_all_ranks(self, tmp_path: Path) -> None:
        """Delete each file in turn; all ranks must raise BadCheckpoint, not list the id, or load the saved values."""
        id = self.save(tmp_path, SHARDED, 1, salt=1)
        files = [str(path) for path in self.find_files(tmp_path, id)]
        assert files, f"no file path under {tmp_path} contains {id}"
        per_rank = get_pool(2).run(ranks.lose_each, self.make_job(tmp_path, SHARDED), id, 1, files)
        noticed = 0
        for file, outcomes in zip(files, zip(*per_rank, strict=True), strict=True):
            kinds = {outcome.partition(":")[0] for outcome in outcomes}
            assert kinds in ({"bad"}, {"gone"}, {"right"}), (
                f"with {file} deleted, the ranks have different or wrong outcomes: {outcomes}"
            )
            noticed += kinds != {"right"}
        assert noticed, "no deleted file is detected"

    @mark_capability("verify")
    def test_flipped_bits_are_detected(self, tmp_path: Path) -> None:
        """Flip a bit in several bytes of each file; each flip must be detected or not affect loaded values."""
        id = self.save(tmp_path, ONE, 1, salt=1)
        places = []
        for path in self.find_files(tmp_path, id):
            size = path.stat().st_size
            places += [(str(path), place) for place in sorted({*range(0, size, max(1, size // 12)), size - 1})]
        outcomes = get_pool(1).run(ranks.flip_each, self.make_job(tmp_path, ONE), id, 1, places)[0]
        kinds = [outcome.partition(":")[0] for outcome in outcomes]
        for (file, place), kind, outcome in zip(places, kinds, outcomes, strict=True):
            assert kind in ("bad", "gone", "right"), f"a bit flip in byte {place} of {file} is not detected: {outcome}"
        assert "bad" in kinds

    @mark_capability("async")
    def test_save_returns_before_the_checkpoint_is_visible(self, tmp_path: Path) -> None:
        job = self.make_job(tmp_path, SHARDED, large=8192)
        tries = [get_pool(2).run(ranks.watch_save, _renew_token(job), step) for step in (1, 2, 3)]
        assert not all(visible for of_ranks in tries for visible, _, _ in of_ranks), (
            "the checkpoint was visible on all ranks whenever `save` returned"
        )
        assert min(seconds - blocked for of_ranks in tries for _, blocked, seconds in of_ranks) > 0


def _renew_token(job: CheckpointerJob) -> CheckpointerJob:
    """Return the job with a new prefix of its keys in the job store."""
    return replace(job, token=f"{job.token}-{next(_number)}")


def _spread(count: int, at_most: int | None) -> list[int]:
    """Return `at_most` of 0 to count - 1 (None: all): the last two, near the commit, and others evenly spaced."""
    if at_most is None or count <= at_most:
        return list(range(count))
    return sorted(
        {count - 1, count - 2, *(i * (count - 2) // (at_most - 2) for i in range(at_most - 2))} & {*range(count)}
    )
