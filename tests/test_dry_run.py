"""A dry run prints a job for weights that only the cluster has."""

from __future__ import annotations

from gangline.cli.train import main as train
from gangline_launch.slurm import commands


def test_dry_run_prints_script_for_absent_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    commands.find_gpus_per_node.cache_clear()
    job = ["recipe=tiny", "launch=slurm", "launch.nodes=2", "launch.processes=2", "parallel=ddp", "run.dir=out"]
    assert train([*job, "model.weights=/lustre/llama", "launch.dry_run=true"]) == 0
    assert "model.weights=/lustre/llama\n" in capsys.readouterr().err
