"""Compare fine-tuning with peft and TRL, on the same model and the same chats, in one process on the CPU.

LoRA: a step (forward, backward, clip, AdamW) with adapters on every linear layer of a Llama, compared with peft on
transformers, and with a step of full fine-tuning. SFT: full fine-tuning on packed chats, compared with TRL's SFTTrainer
with packing, in chat tokens (without padding) per second. Seconds are CPU seconds, medians over steps; the ways
alternate. Needs transformers, peft, trl and datasets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gangline.batch import Batch
from gangline.config import Run
from gangline.config.compose import compose_one
from gangline.data.expand import expand
from gangline.data.sample_reader import KeptMemory, stack_samples
from gangline.mesh import Mesh
from gangline.model.compose import Composed, compose_model
from gangline.model.init_weights import draw_weights
from gangline.plugin import registry
from gangline.runtime import Job, Runtime
from gangline.train.recompute_and_compile import make_finish
from gangline_parallel_megatron_style.explain.fake_comms import FakeComms
from gangline_testkit.inputs import make_full_batch

SHAPE = {"vocab_size": 2048, "dim": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn_dim": 704}
MODEL = ["model=decoder", *(f"model.{name}={value}" for name, value in SHAPE.items())]
RANK, CPU = 8, torch.device("cpu")
Step = Callable[[], None]


def gangline_runtime(run: Run) -> tuple[Runtime, Step]:
    """Return the runtime of a run on one process, and the function that ends each step."""
    tree, plan = compose_model(run)
    mesh = Mesh.of(run.parallel.size_axes(1))
    precision = registry.build(run.precision, run)
    finish = make_finish(run.job.recompute, False)
    runtime = registry.build(run.parallel, Job(Composed(run, tree, plan), mesh, FakeComms(mesh, 0), precision, finish))
    draw_weights(run, runtime.shards(), plan)
    optimizer = registry.build(run.optimizer, run, runtime)

    def update() -> None:
        runtime.clip(1.0)
        optimizer.step(1e-4)
        runtime.finish_update()

    return runtime, update


def ours(words: list[str], batch: Batch) -> Step:
    runtime, update = gangline_runtime(compose_one([*MODEL, "precision=fp32", *words]))

    def step() -> None:
        runtime.step([batch])
        update()

    return step


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SHAPE["vocab_size"],
            hidden_size=SHAPE["dim"],
            intermediate_size=SHAPE["ffn_dim"],
            num_hidden_layers=SHAPE["layers"],
            num_attention_heads=SHAPE["heads"],
            num_key_value_heads=SHAPE["kv_heads"],
            max_position_embeddings=2048,
            tie_word_embeddings=False,
        )
    )


def peft(tokens: torch.Tensor) -> Step:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(ways: dict[str, Step], rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of a step of each way."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, step in ways.items():
            begin = time.process_time()
            step()
            if number > 1:
                found[name].append(time.process_time() - begin)
    return {name: statistics.median(each) for name, each in found.items()}


def lora(rounds: int) -> None:
    tokens = torch.randint(SHAPE["vocab_size"], (4, 257))
    batch = make_full_batch(tokens[:, :-1].contiguous())
    size = ["batch.global_size=4", "batch.sequence_length=256"]
    found = timed(
        {
            "gangline lora": ours([*size, "lora=on", f"lora.rank={RANK}"], batch),
            "peft": peft(tokens[:, :-1].contiguous()),
            "gangline, all weights": ours(size, batch),
        },
        rounds,
    )
    for name, seconds in found.items():
        print(f"LoRA step  {name:<22} {1e3 * seconds:8.1f} ms   {found['peft'] / seconds:5.2f} x peft", flush=True)


def chats(folder: Path, count: int) -> Path:
    """Write chats of different lengths, and a byte tokenizer with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in ("<|end|>", "<|user|>", "<|assistant|>")])
    made.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    rows = [
        {
            "messages": [
                {"role": "user", "content": "why " * (1 + number * 7 % 11)},
                {"role": "assistant", "content": "because " * (1 + number * 13 % 41)},
            ]
        }
        for number in range(count)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "chats.jsonl"


def sft_ours(folder: Path, length: int, rows: int) -> Iterator[tuple[float, int]]:
    """Yield (CPU seconds, number of chat tokens) of each step of gangline."""
    words = [f"data.path={folder}/chats.jsonl", f"data.tokenizer={folder}/tokenizer.json", "data.validation_fraction=0"]
    words += ["data=chat", f"batch.sequence_length={length}", f"batch.global_size={rows}", "precision=fp32"]
    run = compose_one([*MODEL, *words])
    source = registry.build(run.data, run, "train")
    runtime, update = gangline_runtime(run)
    at = 0
    while True:
        begin, numbers = time.process_time(), range(at, at + rows)
        samples = [source.sample(number) for number in numbers]
        runtime.step([expand(stack_samples(samples, numbers, KeptMemory(CPU)), 0, CPU)])
        update()
        seconds, at = time.process_time() - begin, at + rows
        pieces = (source.rows[source.order.row(number)] for number in numbers)
        yield seconds, sum(len(source.chats[chat].tokens) for row in pieces for chat in row)


def sft_theirs(folder: Path, length: int, rows: int, steps: int) -> list[tuple[float, int]]:
    """Return (CPU seconds, number of chat tokens) of each step of SFTTrainer, without the first two."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Clock(TrainerCallback):
        begin = 0.0
        seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.process_time() - self.begin)

    clock = Clock()
    asked = SFTConfig(
        str(folder / "trl"),
        packing=True,
        max_length=length,
        per_device_train_batch_size=rows,
        max_steps=steps + 2,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        assistant_only_loss=True,
    )
    where = {"data_files": str(folder / "chats.jsonl"), "cache_dir": str(folder / "cache")}
    data: Any = load_dataset("json", split="train", **where)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = SFTTrainer(llama(), asked, train_dataset=data, processing_class=tokenizer, callbacks=[clock])
    dataset: Any = trainer.train_dataset
    lengths = [sum(row) for row in dataset["seq_lengths"]]
    trainer.train()
    each = statistics.mean(lengths) * rows
    return [(seconds, round(each)) for seconds in clock.seconds[2:]]


def sft(rounds: int) -> None:
    length, rows = 256, 4
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        chats(folder, 600)
        steps, found = sft_ours(folder, length, rows), {"gangline": [], "SFTTrainer": []}  # type: ignore[var-annotated]
        next(steps), next(steps)
        for _ in range(3):
            found["gangline"] += [next(steps) for _ in range(rounds)]
            found["SFTTrainer"] += sft_theirs(folder, length, rows, rounds)
    rates = {name: statistics.median(tokens / seconds for seconds, tokens in each) for name, each in found.items()}
    for name, rate in rates.items():
        shown = f"{rate:8.0f} chat tokens per CPU second   {rate / rates['SFTTrainer']:5.2f} x SFTTrainer"
        print(f"SFT        {name:<22} {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", choices=("lora", "sft"))
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for name, measure in (("lora", lora), ("sft", sft)):
        if options.only in (None, name):
            measure(options.rounds)


if __name__ == "__main__":
    main()
