"""`gangline parallel explain` and `draw`: output, refused arguments, no ranks started, no torch imported."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from gangline.cli.main import main
from gangline.config.compose import compose_one
from gangline.plugin.registry import installed
from gangline.run.directory import RunDirectory
from gangline.run.events import Events
from gangline_parallel_megatron_style.explain.of_run import explain_run
from gangline_testkit import list_words

LLAMA = (
    "model=llama3-405b parallel=3d parallel.tp=8 parallel.pp=16 parallel.dp_shard=128 launch.processes=16384 "
    "batch.global_size=2048 batch.micro_size=1 batch.sequence_length=8192 precision=bf16"
)


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    """Return a function that runs `gangline parallel` and returns its exit code and output."""
    monkeypatch.chdir(tmp_path)

    def run(words: str) -> tuple[int, str]:
        code = main(["parallel", *words.split()])
        said = capsys.readouterr()
        assert not (said.out and said.err)
        return code, said.out + said.err

    return run


def table(text: str, heading: str) -> dict[str, list[str]]:
    """Return the table under a heading: first column -> other columns."""
    lines = text[text.index(heading) :].splitlines()[1:]
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
    return {row[0]: row[1:] for row in rows[: [*lines, ""].index("")]}


def test_explain_reports_a_small_run(say):
    code, text = say("explain parallel=3d parallel.schedule=zb_h1 precision=bf16")
    assert code == 0
    assert text.startswith("8 ranks, 8 per node, 4 nodes per rack\n")
    assert table(text, "8 ranks")["tp"] == ["2", "4", "node", "0, 1"]
    assert table(text, "8 ranks")["pp"] == ["2", "4", "node", "0, 4"]
    assert "a step has 2.05 k tokens: 8 microbatches of 1 sequence on each data-parallel rank\n" in text
    assert "pipeline: zb_h1, 2 stages of 2 x 2 blocks; each rank waits" in text
    assert {"weights", "gradients", "master weights", "activations", "buffers", "total"} <= set(
        table(text, "peak memory of a rank")
    )
    assert text.endswith("fits a GPU of 80 GB\n")


def test_explain_uses_the_nodes_of_a_run(say, tmp_path):
    """Explain a run that was launched on nodes of two ranks, while its options assume nodes of eight ranks."""
    RunDirectory.create(compose_one(["parallel=3d", "launch.processes=8", "run.dir=out"]))
    assert table(say("explain out")[1], "8 ranks")["pp"][2] == "node"
    for racks, links in (("0011", ["cluster", "rack", "node"]), ("0111", ["cluster", "cluster", "node"])):
        events = Events(tmp_path / "out", 1, by="launcher")
        names = ["n1", "n2", "n3", "n4"]
        places = [f"top.rack{rack}.{name}" for rack, name in zip(racks, names, strict=True)]
        events.write("launch", nodes=names, places=places, processes=8, spares=0)
        events.close()
        code, text = say("explain out")
        assert code == 0
        axes = table(text, "8 ranks, 2 per node")
        assert [axes[axis][2] for axis in ("pp", "dp_shard", "tp")] == links


def test_explain_llama_3_405b_reports_mesh_and_memory(say):
    code, text = say(f"explain {LLAMA}")
    assert code == 0
    assert table(text, "16384 ranks") == {
        "axis": ["ranks", "groups", "links", "group of rank 0"],
        "pp": ["16", "1024", "cluster", "0, 1024, 2048 ... 15360"],
        "dp_shard": ["128", "128", "cluster", "0, 8, 16 ... 1016"],
        "tp": ["8", "2048", "node", "0 to 7"],
    }
    assert "pipeline: 1f1b, 16 stages of 7 + 14 x 8 + 7 blocks; each rank waits 48.6% of the time" in text
    assert "does not fit a GPU of 80 GB: 5 of 16 pipeline ranks need up to 98 GB" in text
    assert "run.recompute=full" in text
    assert say(f"explain {LLAMA} run.recompute=full")[1].endswith("fits a GPU of 80 GB\n")
    assert "fits a GPU of 100 GB" in say(f"explain --gpu-memory 100 {LLAMA}")[1]


def test_rank_parameters_sum_to_the_model():
    """Compare with 405 853 388 800 parameters by the shapes of the model card; each of 8 tp ranks holds the norms."""
    found = explain_run(compose_one(LLAMA.split()))
    norms = 16_384 * (2 * 126 + 1)
    assert sum(stage.parameters for stage in found.ranks) * 8 == 405_853_388_800 + 7 * norms


def test_explain_needs_no_torch_and_no_gpu():
    script = (
        "import sys; from gangline.cli.main import main; "
        "assert main(['parallel', 'explain', 'parallel=3d', 'run.device=cuda', 'launch.processes=64', "
        "'batch.global_size=64']) == 0; "
        "assert main(['parallel', 'draw', '--schedule', 'zb_v']) == 0; "
        "assert main(['plugins']) == 0; "
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (
            "parallel=3d batch.global_size=2 parallel.pp=4 parallel.tp=1",
            "1 microbatch for a pipeline of 4 ranks: the ranks wait",
        ),
        (
            "parallel=3d parallel.zero=3",
            "parallel.zero=3 in a pipeline gathers every block for the forward and the backward pass of each of 8 ",
        ),
        ("parallel=fsdp parallel.dp_shard=1 launch.processes=1", "parallel.zero=3 has no effect"),
        (
            "parallel=tp launch.processes=12 parallel.tp=6 model.heads=6 model.kv_heads=6 model.ffn_dim=96 "
            "batch.sequence_length=96",
            "parallel.tp=6 does not divide the 8 GPUs of a node",
        ),
    ],
)
def test_explain_notes_inefficient_layout(say, words, note):
    code, text = say(f"explain {words}")
    assert code == 0
    assert note in text
    run = compose_one(words.split())
    assert any(note in notice for notice in run.parallel.list_notices(run))


def test_explain_of_default_layout_has_no_notes(say):
    assert "note:" not in say("explain parallel=3d")[1]


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            "explain",
            [
                "parallel=single is a strategy of another package",
                "3d, fsdp, hsdp, tp, pp.",
                "gangline plan parallel=single",
            ],
        ),
        ("explain parallel=tp launch.processes=4", ["parallel.tp=4 does not divide model.heads=6."]),
        ("explain parallel=3d launch.processes=12", ["batch.global_size=16 is not divisible by 3 data-parallel"]),
        ("explain parallel=3d batch.micro_size=3", ["batch.micro_size=3 does not divide 8"]),
        ("explain parallel=3d model.heads=7", ["model.heads=7 does not divide model.dim=192"]),
        (
            "explain parallel=3d parallel.tp=3 parallel.zero=7 launch.processes=8",
            ["parallel.zero=7: expected 0 or 1"],
        ),
        ("explain parallel=3dd", ["parallel=3dd is not available here."]),
        ("explain --gpu-memory", ["--gpu-memory needs a value."]),
        ("explain --gpu-memory much", ["--gpu-memory much: expected a number above 0."]),
        ("explain --gpu-mem=2", ["there is no flag --gpu-mem=2.", "Did you mean --gpu-memory?"]),
        ("explian", ["there is no gangline parallel explian.", "Did you mean explain?", "Choices: explain, draw."]),
        ("draw --schedule zb", ["--schedule zb does not exist.", "Choices: gpipe, 1f1b"]),
        ("draw --stages 2.5", ["--stages 2.5: expected an integer."]),
        ("draw --schedule 1f1b --chunks 3", ["the pipeline schedule 1f1b needs chunks=1 per rank, not 3."]),
        (
            "draw --stages 2 parallel=3d",
            ["draw takes either a run or --schedule, --stages, --microbatches and --chunks, not both."],
        ),
        ("draw parallel=fsdp", ["this run has no pipeline to draw: parallel.pp is 1."]),
        ("draw --svg nowhere/x.svg", ["--svg nowhere/x.svg cannot be written.", "No such file or directory."]),
    ],
)
def test_invalid_arguments_are_refused(say, words, messages):
    code, text = say(words)
    assert code == 2
    assert text.startswith("gangline parallel: ")
    for message in messages:
        assert message in text


def test_draw_command_prints_given_schedule(say, tmp_path):
    code, text = say("draw --schedule gpipe --stages 2 --microbatches 2")
    assert code == 0
    assert [re.findall(r"[A-Z]\d|rank \d", line) for line in text.splitlines()[3:5]] == [
        ["rank 0", "F0", "F1", "B0", "B1"],
        ["rank 1", "F0", "F1", "B0", "B1"],
    ]
    assert say("draw --schedule=zb_v --svg=v.svg") == (0, "v.svg\n")
    words = list_words((tmp_path / "v.svg").read_text())
    assert "Pipeline zb_v: 4 ranks of 2 chunks, 8 microbatches" in words


def test_draw_command_prints_schedule_of_run(say):
    _, of_run = say("draw parallel=3d parallel.pp=2 batch.micro_size=2")
    title, about, *lines = of_run.splitlines()
    assert title.startswith("Pipeline 1f1b of parallel=3d parallel.pp=2 batch.micro_size=2: 2 ranks, 4 microbatches")
    assert about == "simulated, with times in proportion to the FLOPs of each stage"
    assert [line[:7] for line in lines if line.startswith("rank")] == ["rank 0 ", "rank 1 "]
    assert "time in forward passes of the slowest stage" in lines
    assert "F3" in of_run
    assert "F4" not in of_run


def test_help_lists_both_commands(say):
    for words in ("", "--help", "help"):
        code, text = say(words)
        assert code == 0
        assert "gangline parallel explain" in text
        assert "gangline parallel draw" in text


def test_plugin_registers_parts_and_command():
    assert installed().get_commands()["parallel"].summary == "Report the cost of a layout, or draw a pipeline schedule"
    ours = {name for name, offer in installed().get_offers("parallel").items() if "megatron" in offer.distribution}
    assert ours == {"3d", "fsdp", "hsdp", "tp", "pp"}
