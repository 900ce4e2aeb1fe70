"""Complete `train` runs: written files, endings, resume, kills, signals, layouts."""

import json
import os
import random
import signal
import time

import pytest

from gangline.config.defaults import build_default_run
from gangline.model.compose import Composed
from gangline.plugin.registry import build
from gangline.run.directory import RunDirectory
from gangline.run.ending import read_ending
from gangline_testkit.processes import find_living, find_rank_processes, kill, wait_until_none_lives


def state(directory, run_dir, id=None):
    """Return the arrays of a checkpoint by name, and its document; the default is the newest checkpoint."""
    import torch

    from gangline.mesh import Mesh
    from gangline.shard import Layout, Registry, Shard

    run_directory = RunDirectory.open(directory / run_dir)
    run = run_directory.run()
    checkpointer = build(run.checkpoint, run, None)
    id = id or checkpointer.find_latest()
    shapes = checkpointer.read_shapes(id)
    shards = [Shard(name, s, torch.float32, (0,) * len(s), torch.empty(s)) for name, s in shapes.items()]
    checkpointer.load(id, shards, Registry.of(Mesh.of({}), {name: Layout(s) for name, s in shapes.items()}))
    return {shard.name: shard.local for shard in shards}, checkpointer.read_document(id)


def same(first, second):
    import torch

    arrays, document = first
    others, other = second
    assert arrays.keys() == others.keys()
    different = [name for name in arrays if not torch.equal(arrays[name], others[name])]
    assert not different
    keys = ("step", "cursor", "tokens", "seed", "states", "data", "model")
    assert {key: document[key] for key in keys} == {key: other[key] for key in keys}


def test_large_model_is_announced_before_build(tmp_path, capsys):
    from gangline.train.build import announce

    announce(Composed.of(build_default_run(model="llama3-8b")), RunDirectory(tmp_path), 2)
    assert capsys.readouterr().out == f"building llama3-8b, 8030 M parameters, on 2 processes, in {tmp_path}\n"
    announce(Composed.of(build_default_run()), RunDirectory(tmp_path), 1)
    assert capsys.readouterr().out == ""


def test_run_writes_all_expected_files(runs):
    printed = runs.train(
        "run.dir=out",
        "track=[console,jsonl,tensorboard]",
        "track.jsonl.figure=true",
        "validate.every=3",
        "run.sample=20",
    )
    out = runs.directory / "out"
    names = {path.name for path in out.iterdir()}
    assert {
        "config.yaml",
        "attempts.jsonl",
        "parts.json",
        "metrics.jsonl",
        "checkpoints",
        "tensorboard",
        "loss.svg",
    } <= names
    closing = printed[printed.index("done, 6 steps") :]
    assert (
        f"\n  figure {out}/loss.svg\n  curves: gangline report {out} [OTHER_RUN], tensorboard --logdir {out}\n"
        in closing
    )
    assert f"\n  to continue: train resume={out} run.steps=12\n" in closing
    records = runs.read_records("out")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["validation_loss"] is not None for record in records] == [False, False, True] * 2
    last = records[-1]
    assert last["tokens"] == 64
    assert last["mfu"] > 0
    assert records[0].get("rank_mfu") is None, "the first step's rows have the start in them"
    assert all(record["rank_mfu"][0] >= record["mfu"] for record in records[1:])
    assert {"data", "forward_backward", "optimizer"} <= set(last["seconds"])
    assert last["memory_bytes"] > 1e6
    assert [(line["attempt"], line["start"]) for line in runs.read_attempts("out")] == [(1, None)]
    parts = json.loads((out / "parts.json").read_text())
    assert parts["parallel"]["part"] == "single"
    assert parts["parallel"]["distribution"] == "gangline-basics"
    assert "6/6" in printed or "step 6" in printed, printed


def test_same_seed_repeats_the_run(runs):
    runs.train("run.dir=a")
    runs.train("run.dir=b")
    runs.train("run.dir=c", "run.seed=1")
    assert runs.read_curve("a") == runs.read_curve("b")
    assert runs.read_curve("a") != runs.read_curve("c")


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(  # fp16 restores the most state, because it includes a loss scale
    "precision", ["fp16", pytest.param("fp32", marks=NIGHTLY), pytest.param("bf16", marks=NIGHTLY)]
)
def test_killed_run_resumes_with_identical_curve(runs, precision):
    settings = ("run.steps=24", "checkpoint.every=4", f"precision={precision}", "optimizer=adamw")
    runs.train("run.dir=whole", *settings)
    killed = runs.fork("run.dir=killed", *settings)
    runs.wait_for_step(killed, "killed", 6)
    kill(killed)
    runs.train("resume=killed")
    assert runs.read_curve("killed") == runs.read_curve("whole")
    same(state(runs.directory, "killed"), state(runs.directory, "whole"))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_random_kills_keep_identical_curve(runs, seed):
    chance = random.Random(seed)
    width, every = chance.choice([1, 2]), chance.choice([1, 2, 5])
    settings = ("run.steps=20", f"checkpoint.every={every}", f"launch.processes={width}")
    layout = ("parallel=ddp", "run.deterministic=on")
    runs.train("run.dir=whole", *layout, *settings)
    process = runs.start("run.dir=killed", *layout, *settings)
    for _ in range(5):
        runs.wait_for_step(process, "killed", chance.randint(1, 18))
        time.sleep(chance.random() * 0.1)
        kill(process)
        process = runs.start("resume=killed")
    assert process.wait(timeout=300) in (0, 2)  # 2: the last kill came after the last step
    assert runs.read_curve("killed") == runs.read_curve("whole")
    same(state(runs.directory, "killed"), state(runs.directory, "whole"))


def test_resume_extends_a_finished_run(runs):
    runs.train("run.dir=out", "schedule=constant")
    runs.train("resume=out", "run.steps=9")
    runs.train("run.dir=straight", "schedule=constant", "run.steps=9")
    assert runs.read_curve("out") == runs.read_curve("straight")
    before = (runs.directory / "out" / "config.yaml").read_text()
    for words in ((), ("run.steps=2",)):
        said = runs.expect_refusal("resume=out", *words)
        steps = words[0] if words else "run.steps=9"
        assert said.startswith(f"train: the run has ended: step 9 is done, and {steps}.\n  To continue:  train resume=")
        assert said.endswith("out run.steps=18\n")
    (runs.directory / "out" / "ending.json").unlink()  # as after a kill
    assert "step 9 is done, and run.steps=2." in runs.expect_refusal("resume=out", "run.steps=2")
    assert (runs.directory / "out" / "config.yaml").read_text() == before


def test_from_option_starts_new_run_with_same_settings(runs):
    runs.train("run.dir=out", "run.seed=5")
    runs.train("from=out", "run.dir=again")
    assert runs.read_curve("again") == runs.read_curve("out")
    assert RunDirectory.open(runs.directory / "again").run().seed == 5


@pytest.mark.parametrize(("name", "code", "reason"), [("SIGTERM", 75, "preempted"), ("SIGINT", 130, "signal")])
def test_signal_saves_checkpoint_and_ends_processes(runs, name, code, reason):
    start = runs.start if name == "SIGINT" else runs.fork  # Ctrl-C signals a process group; a fork has its own
    process = start("run.dir=out", "run.steps=100000", "parallel=ddp", "launch.processes=2", "track=[console,jsonl]")
    runs.wait_for_step(process, "out", 3)
    ranks = find_rank_processes(runs.directory / "out").values()
    (session,) = {os.getsid(pid) for pid in ranks}
    assert len({*ranks} & find_living(session).keys()) == 2
    if name == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == code, printed
    ending = read_ending(runs.directory / "out")
    assert (ending.reason, ending.exit_code, ending.requeue) == (reason, code, code == 75)
    assert "Traceback" not in printed
    assert f"\n  to continue: train resume={runs.directory / 'out'}\n" in printed
    wait_until_none_lives(session)
    done = runs.read_records("out")[-1]
    assert done["checkpoint"] == f"step-{done['step']:08d}"
    _, document = state(runs.directory, "out")
    assert document["step"] == done["step"]


def test_nohup_keeps_the_run_alive_on_sighup(runs):
    process = runs.start("run.dir=out", "run.steps=100000", "launch.processes=1", prefix=["nohup"])
    runs.wait_for_step(process, "out", 3)
    before = find_rank_processes(runs.directory / "out")
    assert list(before) == [0]
    for pid in find_living(process.pid):  # as when the terminal is closed
        os.kill(pid, signal.SIGHUP)
    runs.wait_for_step(process, "out", runs.read_records("out")[-1]["step"] + 20)
    assert find_rank_processes(runs.directory / "out") == before, "the rank was started again"
    process.terminate()
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 75, printed


def test_sigterm_to_a_rank_restarts_the_run_once(runs):
    """Send SIGTERM to a rank, as a memory daemon does: it uses a restart; without one left the run saves and ends."""
    words = ("run.steps=100000", "parallel=ddp", "launch.processes=2", "launch.max_restarts=1")
    process = runs.fork("run.dir=out", *words)
    out = runs.directory / "out"
    runs.wait_for_step(process, "out", 3)
    for start in (1, 2):
        while runs.read_records("out")[-1]["generation"] < start:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        os.kill(find_rank_processes(out)[1], signal.SIGTERM)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 75, printed
    assert "a rank received a stop request: SIGTERM at step" in printed
    assert "restart 1 of 1" in printed
    assert "nodes joined" not in printed
    assert read_ending(out).reason == "preempted"


def test_two_rank_checkpoint_resumes_on_other_widths(runs):
    layout = ("run.deterministic=on", "optimizer=adamw", "checkpoint.every=3", "precision=fp64")
    runs.train("run.dir=two", "parallel=ddp", "launch.processes=2", "run.steps=3", "schedule=constant", *layout)
    runs.train("run.dir=straight", "run.steps=6", "schedule=constant", *layout)
    for width in (1, 4):
        copy = f"on{width}"
        (runs.directory / copy).mkdir()
        os.system(f"cp -r {runs.directory}/two/. {runs.directory}/{copy}/")
        runs.train(f"resume={copy}", "run.steps=6", f"launch.processes={width}")
        for (step, loss, norm), (_, loss2, norm2) in zip(
            runs.read_curve(copy), runs.read_curve("straight"), strict=True
        ):
            assert loss == pytest.approx(loss2, rel=1e-10), step
            assert norm == pytest.approx(norm2, rel=1e-10), step


def test_ddp_matches_one_process_bitwise(runs):
    common = ("run.deterministic=on", "batch.micro_size=1", "validate.every=3", "validate.samples=5")
    runs.train("run.dir=one", "parallel=single", "parallel.groups=2", *common)
    runs.train("run.dir=two", "parallel=ddp", "launch.processes=2", *common)
    assert runs.read_curve("one") == runs.read_curve("two")
    one, two = (
        [r["validation_loss"] for r in runs.read_records(name) if r["step"] % 3 == 0] for name in ("one", "two")
    )
    assert one == two
    same(state(runs.directory, "one"), state(runs.directory, "two"))


def test_recompute_with_muon_and_accumulation_matches(runs):
    plain = ("optimizer=muon", "batch.micro_size=2")
    runs.train("run.dir=plain", *plain)
    runs.train("run.dir=recomputed", *plain, "run.recompute=full")
    assert runs.read_curve("plain") == runs.read_curve("recomputed")


def test_nonfinite_loss_stops_before_weight_update(runs):
    printed = runs.train("run.dir=out", "precision=fp32", "optimizer.learning_rate=1e30", "checkpoint.every=1", code=3)
    last = runs.read_records("out")[-1]
    assert last["finite"] is False
    assert "not-finite" in printed
    arrays, document = state(runs.directory, "out")
    assert document["step"] == last["step"] - 1, "nothing is saved of a step that stopped the run"
    assert all(bool(array.isfinite().all()) for array in arrays.values())
