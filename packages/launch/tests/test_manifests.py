"""`launch=kubernetes` manifests: golden files, published definitions, client models. No cluster is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from gangline.cli.train import main as train
from gangline.config.defaults import build_default_run
from gangline_launch.kubernetes import manifests
from gangline_launch.kubernetes.config import KubernetesLaunch
from gangline_launch.kubernetes.launcher import dump
from gangline_launch.kubernetes.scheduler import parse_state
from gangline_launch.state import ENDED, RUNS, WAITS

GOLDEN = Path(__file__).parent / "golden"
AGAIN = os.environ.get("REGENERATE") == "1"
CASES = {
    "jobset": KubernetesLaunch(nodes="4", spares=1, image="registry/llm:1", volume="runs:/runs"),
    "kueue": KubernetesLaunch(
        nodes="16",
        image="registry/llm:1",
        volume="runs:/runs",
        namespace="llm",
        queue="team",
        cluster_queue="h100",
        priority="high",
        topology="cloud.provider.com/topology-rack",
        topology_mode="required",
        secrets=["hub-token"],
        setup=["ulimit -l unlimited"],
    ),
    "devices": KubernetesLaunch(
        nodes="2",
        image="registry/llm:1",
        volume="runs:/runs",
        fabric="efa",
        resources=["vpc.amazonaws.com/efa:32", "hugepages-2Mi:5120Mi", "memory:900Gi"],
    ),
    "fabric": KubernetesLaunch(nodes="2", image="registry/llm:1", volume="runs:/runs", fabric="gcp_tcpxo"),
}
DIRECTORIES = {"fabric": "/runs/some one's/00"}


def rendered(name: str) -> list[dict]:
    run = build_default_run(parallel="ddp", launch=CASES[name])
    return manifests.render(CASES[name], run, Path(DIRECTORIES.get(name, "/runs/my_run.7")), "0123abcd")


@pytest.mark.parametrize("name", CASES)
def test_manifests_match_golden_files(name):
    text, path = dump(rendered(name)), GOLDEN / f"{name}.yaml"
    if AGAIN:
        path.write_text(text)
    assert text == path.read_text(), "REGENERATE=1 writes it anew"
    assert list(yaml.safe_load_all(text)) == rendered(name)


def problems(manifest: dict) -> list[str]:
    """Return the violations of the published definition of this kind and version; see reduce_schema.py."""
    name = f"{manifest['kind']}-{manifest['apiVersion'].rpartition('/')[2]}".lower()
    schema = json.loads((Path(__file__).parent / "schemas" / f"{name}.json").read_text())
    errors = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return sorted(f"{error.json_path}: {error.message}" for error in errors)


@pytest.mark.parametrize("name", CASES)
def test_manifests_fit_the_published_definitions(name):
    assert [problems(manifest) for manifest in rendered(name)] == [[] for _ in rendered(name)]


def test_published_definitions_refuse_unknown_wrong_and_missing_fields():
    queue, job_set = rendered("kueue")
    queue["spec"]["clusterQueues"] = queue["spec"].pop("clusterQueue")
    job_set["spec"]["failurePolicy"] |= {"maxRestarts": "3", "restartStrategy": "Never"}
    (job,) = job_set["spec"]["replicatedJobs"]
    del job["name"]
    pod = job["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["resources"]["limits"]["memory"] = "900 GB"
    pod["restartpolicy"] = pod.pop("restartPolicy")
    assert len(problems(queue)) == 1
    said = problems(job_set)
    for path, word in (
        ("failurePolicy.maxRestarts", "'3' is not of type 'integer'"),
        ("failurePolicy.restartStrategy", "'Never' is not one of"),
        ("replicatedJobs[0]", "'name' is a required property"),
        ("limits.memory", "'900 GB' does not match"),
        ("template.spec.template.spec", "'restartpolicy' was unexpected"),
    ):
        assert any(f"{path}: " in line and word in line for line in said), (path, said)
    assert len(said) == 5


@pytest.mark.parametrize("name", CASES)
def test_job_set_round_trips_through_client(name):
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    job_set = rendered(name)[-1]
    read = JobsetV1alpha2JobSet.from_dict(job_set)
    assert read is not None
    assert read.to_dict() == job_set


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch.volume=runs:/runs"], "needs launch.image"),
        (["launch.image=x"], "needs launch.volume"),
        (["launch.image=x", "launch.volume=runs:/else"], "is not on launch.volume"),
        (
            ["launch.image=x", "launch.volume=runs:/runs", "launch.cluster_queue=q"],
            "launch.cluster_queue needs launch.queue",
        ),
        (["launch.image=x", "launch.volume=runs:/runs", "run.dir=s3://runs/one"], "which object stores do not support"),
        (["launch.image=x", "launch.volume=runs:/runs", "launch.fabric=roce"], "launch.resources=[rdma/"),
        (
            ["launch.image=x", "launch.volume=runs:/runs", "launch.resources=[rdma/a:0]"],
            "does not have the form NAME:COUNT",
        ),
        (["launch.image=x", "launch.volume=runs:/runs", "launch.levels=[a b]"], "is not a valid name of a label"),
    ],
)
def test_missing_or_invalid_pod_options_are_refused(words, said, capsys):
    own = ["recipe=tiny", "parallel=ddp", "launch=kubernetes", "launch.nodes=2", "run.dir=/runs/one"]
    assert train([*own, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "bad", "good"),
    [
        ("namespace", "Bad NS", "team-1"),
        ("queue", "No_Such_Queue!", "team.queue"),
        ("priority", "x y", "high"),
        ("topology", "bad label!", "cloud.provider.com/rack"),
        ("secrets", ["a b"], ["a.b"]),
        ("secrets", ["x" * 254], ["x" * 253]),
        ("image", "an image; rm", "registry:5000/a/B@sha256:0f"),
        ("queue", "q" * 64, "q" * 63),
        ("namespace", "a\n", "a"),
    ],
)
def test_invalid_kubernetes_names_are_refused_before_submit(option, bad, good):
    def said(value):
        config = replace(CASES["jobset"], **{option: value})
        run = build_default_run(parallel="ddp", launch=config)
        run.job.dir = "/runs/one"
        return [problem.what for problem in config.check(run)]

    shown = bad[0] if isinstance(bad, list) else bad
    (what,) = said(bad)
    assert what.startswith(f"launch.{option}={shown!r} is not a valid name of ")
    assert said(good) == []


def test_run_dir_with_a_line_break_is_refused(capsys):
    own = [
        "recipe=tiny",
        "parallel=ddp",
        "launch=kubernetes",
        "launch.nodes=2",
        "launch.image=x",
        "launch.dry_run=true",
    ]
    assert train([*own, "launch.volume=runs:/runs", 'run.dir="/runs/a\nb"']) == 2
    assert r"run.dir='/runs/a\nb' contains a control character" in capsys.readouterr().err


def test_only_dry_run_works_without_kubectl(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    words = ["recipe=tiny", "parallel=ddp", "launch=kubernetes", "launch.nodes=2", "launch.image=x"]
    words += [f"launch.volume=runs:{tmp_path}", f"run.dir={tmp_path}/one"]
    assert train([*words, "launch.dry_run=true"]) == 0
    printed, said = capsys.readouterr()
    assert yaml.safe_load(printed)["kind"] == "JobSet"
    assert said == ""
    assert train([*words, "launch.dry_run=true", "data.path=/pods/only"]) == 0
    assert (
        "not checked, because this machine does not have the files: data.path=/pods/only\n" in capsys.readouterr().err
    )
    assert train(words) == 2
    assert "kubectl, which is not installed on this machine" in capsys.readouterr().err
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    "words", [("link", "link/one"), ("link", "real/one"), ("real", "link/one"), ("real", "real/../link/one")]
)
def test_linked_run_dir_is_mapped_to_pod_mount(words, tmp_path, capsys):
    """Use a link at the path that users type, because a login node often mounts the volume elsewhere."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "away").symlink_to(tmp_path)
    mount, run_dir = (f"{tmp_path}/{word}" for word in words)
    own = [
        "recipe=tiny",
        "parallel=ddp",
        "launch=kubernetes",
        "launch.nodes=2",
        "launch.image=x",
        "launch.dry_run=true",
    ]
    assert train([*own, f"launch.volume=my.runs:{mount}/", f"run.dir={run_dir}"]) == 0
    (job,) = yaml.safe_load(capsys.readouterr().out)["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["volumeMounts"][0]["mountPath"] == mount
    assert f"out={mount}/one/launch/" in container["command"][2]
    assert f" {mount}/one --nodes" in container["command"][2]
    for outside in ("..", "../one", "away/one", ""):
        assert train([*own, f"launch.volume=runs:{mount}", f"run.dir={mount}/{outside}"]) == 2
        assert f"resolved mount point: {tmp_path}/real." in capsys.readouterr().err


def test_job_set_names_are_unique_and_valid():
    paths = [f"/runs/{sweep}/{run:02d}" for sweep in ("a", "b") for run in range(3)] + [
        "/runs/" + "long-" * 20,
        "/x/___",
    ]
    paths += ["/runs/" + "long-" * 20 + "2", "/runs/ÄÖ", "/runs/My_Run.7", "/runs/my-run-7"]
    names = [manifests.make_name(Path(path), mark) for path in paths for mark in ("one", "two")]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        assert len(name) <= 40


def test_pod_script_logs_output_and_sets_network_environment(tmp_path):
    """Run the script in bash, with a stand-in for python and a directory name that needs quotes."""
    run_dir = tmp_path / "it's mine"
    (run_dir / "launch").mkdir(parents=True)
    (run_dir / "launch" / "node-1.out").write_text("before\n")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/bash\nprintf "[%s]" "$@" "$NCCL_LIB_DIR" "$OF_PROFILE" >&2; echo; sleep 2; exit 3\n')
    python.chmod(0o755)
    (tmp_path / "nccl-env-profile.sh").write_text("export OF_PROFILE=set\n")
    config = CASES["fabric"]
    text = manifests.render_script(config, build_default_run(parallel="ddp", launch=config), run_dir)
    variables = {"PATH": f"{python.parent}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    variables["NCCL_LIB_DIR"] = str(tmp_path)
    with (tmp_path / "logs").open("wb") as logs:  # no pipe, because tail ends only after the wait for bash
        done = subprocess.run(["bash", "-c", text], env=variables, stdout=logs, timeout=60)
    said = (
        f"[-P][-m][gangline_launch.agent][{run_dir}][--nodes][2:2][--per-node][8][--processes][16][{tmp_path}][set]\n"
    )
    assert (run_dir / "launch" / "node-1.out").read_text() == "before\n" + said
    deadline = time.monotonic() + 60
    while (tmp_path / "logs").read_text() != said and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "logs").read_text() == said  # output for `kubectl logs`
    assert done.returncode == 3
    (tmp_path / "nccl-env-profile.sh").unlink()
    assert subprocess.run(["bash", "-c", text], env=variables, timeout=60).returncode == 2
    assert "nccl-env-profile.sh" in (run_dir / "launch" / "node-1.out").read_text()


def expanded(command: str, variables: dict[str, str]) -> str:
    """Expand a container's command as Kubernetes does: $(NAME) is a variable that is set, $$ is one dollar sign."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\((.*?)\)", value, command)


def test_kubernetes_variable_expansion_leaves_script_unchanged():
    config = replace(CASES["kueue"], setup=["export A=$(HOME) B=$$$ C=$(PYTHONUNBUFFERED)"])
    run, run_dir = build_default_run(parallel="ddp", launch=config), Path("/runs/$(PYTHONUNBUFFERED)/$$")
    command = manifests.build_pod(config, run, run_dir)["spec"]["containers"][0]["command"]
    assert expanded(command[2], {"PYTHONUNBUFFERED": "1"}) == manifests.render_script(config, run, run_dir)
    assert "tail --pid=$$ " in manifests.render_script(config, run, run_dir)


def test_job_set_state_is_parsed_and_described():
    waits = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}}, "spec": {"suspend": True}}
    assert parse_state(waits).phase == WAITS
    assert "team" in parse_state(waits).why
    assert parse_state({"spec": {}, "status": {"replicatedJobsStatus": [{"ready": 1}], "restarts": 1}}).phase == RUNS
    missing = parse_state({"spec": {}, "status": {"replicatedJobsStatus": [{"ready": 0, "active": 1}]}})
    assert (missing.phase, missing.describe()) == (RUNS, "active (some pods are not ready)")
    starting = parse_state({"spec": {}, "status": {"replicatedJobsStatus": [{"ready": 0, "active": 0}]}})
    assert (starting.phase, starting.describe()) == (WAITS, "pods starting")
    failed = {"type": "Failed", "status": "True", "message": "a pod failed"}
    assert parse_state({"spec": {}, "status": {"conditions": [failed]}}).phase == ENDED
