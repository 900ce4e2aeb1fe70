"""Task files for lm-eval, with a base model and chats for their questions, generated for the tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from chats import tokenizer, write
from small_models import llama

SETTINGS = (
    "batch.global_size=4",
    "batch.sequence_length=64",
    "run.sample=0",
    "track=[jsonl]",
    "track.jsonl.figure=false",
    "precision=fp32",
)
SETTINGS += ("data=chat", "lora=on", "optimizer.learning_rate=0.02", "schedule=constant")

LM_EVAL = ("gangline_finetune.evaluate.tasks", "lm_eval.evaluator")  # slow imports of each run that evaluates

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: ["It is 3.", "It is 7.", "no"]
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question * 9}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "write": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "It"
generation_kwargs: {until: ["e"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def made(folder: Path, tasks: Mapping[str, str], count: int, bos: bool = False) -> tuple[str, ...]:
    """Write each task as `own_NAME` to NAME.yaml, and return the overrides of a run that trains on the tasks.

    count: number of questions per task; bos: the tokenizer adds a BOS token before each text
    """
    base = llama(folder / "base")
    path = tokenizer(folder / "base", bos=bos)
    rows = [{"question": f"{n % 7}+{n % 3}?", "answer": n % 3} for n in range(count)]
    data = write(folder / "rows.jsonl", rows)
    chats = [
        {"messages": [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": "It is 3."}]}
        for r in rows
    ]
    write(folder / "chats.jsonl", chats)
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    for name, text in tasks.items():
        (folder / f"{name}.yaml").write_text(f"task: own_{name}\n{source}{text}")
    return (*SETTINGS, *base, f"data.tokenizer={path}", "data.path=chats.jsonl")
