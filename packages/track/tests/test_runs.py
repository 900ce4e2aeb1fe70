"""Real runs: killed and gone on with, without a key, without a network, with a key that the service refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from stored import mlflow_history, trackio_history, wandb_history

from gangline.figure import Figure
from gangline.track import read_records


def environment(home: Path, **more: str) -> dict[str, str]:
    """A user's who has no account."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    own = {"HOME": str(home), "TRACKIO_DIR": str(home / "trackio"), "OMP_NUM_THREADS": "1"}
    return {**kept, **own, **more}


def train(home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gangline.cli.train", *words]
    return subprocess.run(command, env=environment(home, **more), cwd=home, capture_output=True, text=True, timeout=900)


def picture(path: Path) -> None:
    """A PNG, as a verb that draws leaves one."""
    figure = Figure("load", "", 100)
    figure.rect(10, 20, 50, 50, "#2166ac")
    path.write_bytes(figure.png()[2])


def test_a_killed_run_goes_on_in_all_three(tmp_path: Path) -> None:
    out = tmp_path / "out"
    track = "track=[jsonl,wandb,mlflow,trackio]"
    rate = ("schedule=constant", "schedule.warmup_steps=0")  # the same whatever the number of steps
    words = ("recipe=tiny", "run.steps=100000", f"run.dir={out}", "checkpoint.every=3", track, *rate)
    with subprocess.Popen(
        [sys.executable, "-m", "gangline.cli.train", *words, "track.wandb.mode=offline"],
        env=environment(tmp_path),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        until = time.monotonic() + 500
        kept = out / "track"
        while time.monotonic() < until and process.poll() is None:
            metrics = out / "metrics.jsonl"
            if len(list(kept.glob("*.json"))) == 3 and len(read_records(metrics)) > 20 and mlflow_history(out):
                break
            time.sleep(0.2)
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        os.killpg(process.pid, signal.SIGKILL)
    before = {path.name: path.read_text() for path in kept.iterdir()}
    last = read_records(out / "metrics.jsonl")[-1]["step"] + 5
    picture(out / "load.png")
    patient = [f"track.{name}.deadline_seconds=300" for name in ("wandb", "mlflow", "trackio")]
    again = train(tmp_path, f"resume={out}", f"run.steps={last}", *patient)
    assert again.returncode == 0, again.stderr
    assert {path.name: path.read_text() for path in kept.iterdir()} == before, "it is another run now"
    steps = list(range(1, last + 1))
    assert [step for step, _ in wandb_history(out)] == steps
    assert [step for step, _ in mlflow_history(out)] == steps
    assert [step for step, _ in trackio_history(out, tmp_path / "trackio")] == steps
    assert any(key.startswith("pictures/load") for key in wandb_history(out)[-1][1])
    true = {record["step"]: record["loss"] for record in read_records(out / "metrics.jsonl")}
    assert all(abs(loss - true[step]) < 1e-6 for step, loss in mlflow_history(out))
    assert all(abs(values["loss"] - true[step]) < 1e-6 for step, values in wandb_history(out))


@pytest.fixture
def refusing() -> Iterator[str]:
    """A service that answers every question with 401, as wandb does to an expired key."""

    class Refuse(BaseHTTPRequestHandler):
        def refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = do_PUT = refuse

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def goes_on_offline(tmp_path: Path, **more: str) -> str:
    """A run that wants to be online: what it said."""
    out = tmp_path / "out"
    done = train(
        tmp_path, "recipe=tiny", "run.steps=4", f"run.dir={out}",
        "track=[console,jsonl,wandb]", "track.wandb.connect_seconds=5",
        "track.wandb.deadline_seconds=300", **more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("track=wandb goes on offline") == 1, done.stdout + done.stderr
    assert "wandb sync" in done.stderr
    assert [step for step, _ in wandb_history(out)] == [1, 2, 3, 4]
    return done.stderr


def test_without_a_key_wandb_goes_on_offline(tmp_path: Path) -> None:
    assert "there is no key" in goes_on_offline(tmp_path)


def test_without_a_network_wandb_goes_on_offline(tmp_path: Path) -> None:
    goes_on_offline(tmp_path, WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")


def test_with_a_key_that_is_refused_wandb_goes_on_offline(tmp_path: Path, refusing: str) -> None:
    goes_on_offline(tmp_path, WANDB_API_KEY="0" * 40, WANDB_BASE_URL=refusing)


def test_an_mlflow_that_is_away_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("recipe=tiny", "run.steps=4", f"run.dir={out}", "track=[console,jsonl,mlflow]")
    options = ("track.mlflow.uri=http://127.0.0.1:9", "track.mlflow.deadline_seconds=300")
    away = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "3"}
    done = train(tmp_path, *words, *options, **away)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("track=mlflow failed and is left out") == 1
    assert len(read_records(out / "metrics.jsonl")) == 4


def test_disabled_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = train(
        tmp_path, "recipe=tiny", "run.steps=2", f"run.dir={out}", "track=[jsonl,wandb]", "track.wandb.mode=disabled"
    )
    assert done.returncode == 0, done.stderr
    assert not (out / "wandb").exists()
    assert not (out / "track").exists()
