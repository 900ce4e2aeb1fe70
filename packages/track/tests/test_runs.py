"""Real runs with tracking services: killed and resumed, without a key, without a network, with a rejected key."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from PIL import Image
from stored import mlflow_history, trackio_history, wandb_history

from gangline.record import read_records
from gangline_testkit import RealRuns, as_installed
from gangline_testkit.processes import kill

# Modules that each run imports on its trackers' threads, which takes seconds of CPU time.
LIBRARIES = ("gangline_track.to_wandb", "gangline_track.to_mlflow", "gangline_track.to_trackio")
PATIENT = [f"track.{name}.deadline_seconds=300" for name in ("wandb", "mlflow", "trackio")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRuns]:
    """Yield runs of a user who has no account at a tracking service."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch, RealRuns(home, seconds=900.0, loaded=LIBRARIES) as found:
        for name in [name for name in os.environ if name.startswith(("WANDB", "MLFLOW", "TRACKIO"))]:
            patch.delenv(name)
        found.environment |= {"HOME": str(home), "TRACKIO_DIR": str(home / "trackio")}
        with as_installed("gangline-paced", "paced", path=Path(__file__).parent):
            yield found


def picture(path: Path) -> None:
    """Write a PNG, as a command that plots does."""
    Image.new("RGB", (50, 50), "#2166ac").save(path)


def test_killed_run_resumes_in_all_three_services(runs: RealRuns) -> None:
    out = runs.directory / "out"
    track = ("track=[jsonl,wandb,mlflow,trackio]", "track.wandb.mode=offline", "callback=[paced]")
    rate = ("schedule=constant", "schedule.warmup_steps=0")  # does not depend on the number of steps
    process = runs.fork("run.dir=out", "run.steps=100000", "checkpoint.every=3", *track, *rate)
    kept = out / "track"
    runs.wait_for_step(process, "out", 21)
    until = time.monotonic() + 500
    while not (len(list(kept.glob("*.json"))) == 3 and mlflow_history(out)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.5)
    kill(process)
    before = {path.name: path.read_text() for path in kept.iterdir()}
    last = read_records(out / "metrics.jsonl")[-1]["step"] + 5
    picture(out / "load.png")
    runs.train("resume=out", f"run.steps={last}", *PATIENT)
    assert {path.name: path.read_text() for path in kept.iterdir()} == before, "it is another run now"
    steps = list(range(1, last + 1))
    assert [step for step, _ in wandb_history(out)] == steps
    assert [step for step, _ in mlflow_history(out)] == steps
    assert [step for step, _ in trackio_history(out, runs.directory / "trackio")] == steps
    assert any(key.startswith("pictures/load") for key in wandb_history(out)[-1][1])
    true = {record["step"]: record["loss"] for record in read_records(out / "metrics.jsonl")}
    assert dict(mlflow_history(out)) == pytest.approx(true, rel=0, abs=1e-6)
    assert {step: values["loss"] for step, values in wandb_history(out)} == pytest.approx(true, rel=0, abs=1e-6)


@pytest.fixture
def refusing() -> Iterator[str]:
    """Yield the URL of a service that answers every request with 401, as wandb does for an expired key."""

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


def goes_on_offline(runs: RealRuns, name: str, **more: str) -> str:
    """Train a run that tracks online, check that it continues offline, and return its output."""
    words = ("track=[console,jsonl,wandb]", "track.wandb.connect_seconds=5", "run.steps=4")
    printed = runs.train(f"run.dir={name}", *words, "track.wandb.deadline_seconds=300", **more)
    assert printed.count("track=wandb continues offline") == 1, printed
    assert "wandb sync" in printed
    assert [step for step, _ in wandb_history(runs.directory / name)] == [1, 2, 3, 4]
    return printed


def test_wandb_without_key_continues_offline(runs: RealRuns) -> None:
    assert "no wandb API key" in goes_on_offline(runs, "keyless")


def test_wandb_without_network_continues_offline(runs: RealRuns) -> None:
    goes_on_offline(runs, "alone", WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")


def test_wandb_with_rejected_key_continues_offline(runs: RealRuns, refusing: str) -> None:
    goes_on_offline(runs, "refused", WANDB_API_KEY="0" * 40, WANDB_BASE_URL=refusing)


def test_unreachable_mlflow_is_left_out(runs: RealRuns) -> None:
    words = ("run.dir=away", "run.steps=4", "track=[console,jsonl,mlflow]")
    options = ("track.mlflow.uri=http://127.0.0.1:9", "track.mlflow.deadline_seconds=300")
    away = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "3"}
    printed = runs.train(*words, *options, **away)
    assert printed.count("track=mlflow failed and is disabled from now on") == 1
    assert len(runs.read_records("away")) == 4


def test_disabled_wandb_writes_no_files(runs: RealRuns) -> None:
    runs.train("run.dir=disabled", "run.steps=2", "track=[jsonl,wandb]", "track.wandb.mode=disabled")
    assert not (runs.directory / "disabled" / "wandb").exists()
    assert not (runs.directory / "disabled" / "track").exists()
