"""Suggestions ("Did you mean ...?") for unknown words, by spelling and by names in other frameworks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

from gangline.plugin import catalogue

# Option that every run has -> its names in other frameworks, compared with the last name of a dotted path.
SYNONYMS = {
    "run.steps": "epochs num_epochs max_steps num_steps train_steps total_steps max_iters iters",
    "run.seed": "random_seed rng_seed",
    "run.dir": "output_dir out_dir save_dir log_dir logdir",
    "batch.global_size": "bs batch_size global_batch_size gbs train_batch_size",
    "batch.micro_size": "micro_batch_size mbs device_batch_size per_device_batch_size per_device_train_batch_size",
    "batch.sequence_length": "seq_len seqlen seq_length sequence_len context_length context ctx block_size max_length",
    "validate.every": "eval_every eval_interval eval_steps val_interval",
    "optimizer.learning_rate": "lr max_lr peak_lr rate",
    "optimizer.clip_norm": "grad_clip clip clip_grad clip_grad_norm gradient_clipping max_norm max_grad_norm",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps",
    "model.vocab_size": "vocab n_vocab vocabulary_size",
    "checkpoint.every": "save_every save_interval save_steps checkpoint_interval ckpt_every",
    "data.path": "dataset data_path data_dir corpus files",
    "launch.processes": "nproc nproc_per_node num_processes world_size gpus ngpus num_gpus",
}
# Words of other frameworks that have no single corresponding option -> what to type.
ANSWERS = {
    "gradient_checkpointing activation_checkpointing checkpoint_activations recompute_activations": (
        "run.recompute=full  (activation checkpointing; selective: attention only)"
    ),
    "gradient_accumulation_steps gradient_accumulation grad_accum accumulation accumulate_grad_batches": (
        "batch.micro_size=N  (gradient accumulation = batch.global_size / (batch.micro_size x data-parallel ranks))"
    ),
    "config_file": "recipe=FILE.yaml",
}
_ANSWER = {word: answer for words, answer in (ANSWERS | catalogue.WORDS).items() for word in words.split()}
_OURS = {theirs: ours for ours, words in (SYNONYMS | catalogue.SYNONYMS).items() for theirs in words.split()}


def suggest_near(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "Did you mean X?" with the entry of `known` that is closest to `word`; "" if none is close."""
    close = difflib.get_close_matches(word, list(known), 1, cutoff)
    return f"Did you mean {close[0]}?" if close else ""


# Group of parts -> names of products that other frameworks support by an option.
ELSEWHERE = {"track": "wandb mlflow comet neptune aim clearml"}
_GROUP = {theirs: ours for ours, words in ELSEWHERE.items() for theirs in words.split()}


def answer(word: str, value: str, words: Mapping[str, str]) -> str:
    """Return what to type in place of a word of another framework; "" for an unknown word.

    value: the user's value for the word. words: words of installed parts (`Installed.get_words`).
    """
    name = _get_name(word)
    template = _ANSWER.get(name) or next((advice for theirs, advice in words.items() if name in theirs.split()), "")
    number = value if value.isdecimal() else "N"
    template = template or catalogue.PEERS.get(word.lower().replace("-", "_"), "")
    if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", template):
        return f"Did you mean {template}?"
    return "Type  " + template.replace("{n}", number) if template else ""


def explain_foreign(word: str, choices: Collection[str]) -> list[str]:
    """Return lines for a word that names a product for which a group has no part; [] for any other word."""
    name = word.rpartition(".")[2].lower()
    if (group := _GROUP.get(name)) is None or name in choices:
        return []
    return [
        f"{name} is not supported here. Choices: {group}=[{','.join(choices)}].",
        f"To write a part for {name}:  gangline new-plugin {name} --kind tracker",
    ]


def find_options(word: str, known: Collection[str], synonyms: Mapping[str, str]) -> list[str]:
    """Return options in `known` with the last name of `word`, else options that have the name as a synonym."""
    name = word.replace("-", "_")
    own = [path for path in known if path == name or path.rpartition(".")[2] == name.rpartition(".")[2]]
    return own or _find_synonyms(name, known, synonyms)


def suggest_synonym(path: str, known: Collection[str], synonyms: Mapping[str, str]) -> str:
    """Return "Did you mean X?" with the options in `known` that have the last name of `path` as a synonym; else ""."""
    ours = _find_synonyms(path, known, synonyms)
    return f"Did you mean {' or '.join(ours)}?" if ours else ""


def _find_synonyms(word: str, known: Collection[str], synonyms: Mapping[str, str]) -> list[str]:
    name = _get_name(word)
    ours = [_OURS.get(name, ""), *(path for path, theirs in synonyms.items() if name in theirs.split())]
    paths = [path for path in dict.fromkeys(ours) if path in known]
    section = word.rpartition(".")[0]  # an option of the section that the user named goes first
    return [path for path in paths if section and path.rpartition(".")[0] == section] or paths


def _get_name(path: str) -> str:
    """Return the last name of a dotted path in lower case, with underscores instead of dashes."""
    return path.rpartition(".")[2].lower().replace("-", "_")
