"""`gangline data prepare INPUT... --out DIR`: prepare a token store from text, JSONL or Parquet; write pack plans."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gangline import UserError
from gangline_dataloader.commands import check_out
from gangline_dataloader.packing.pack_plan import PackPlan, list_lengths, make
from gangline_dataloader.prepare import cluster
from gangline_dataloader.prepare.clean import DEFAULT, RULES
from gangline_dataloader.prepare.documents import check_first_row
from gangline_dataloader.prepare.inputs import Input, list_inputs
from gangline_dataloader.prepare.prepare_plan import PreparePlan
from gangline_dataloader.prepare.private import KINDS
from gangline_dataloader.prepare.run import check_not_a_part, lock_store, plan_and_carry_out, prepare
from gangline_dataloader.prepare.settings import BYTES, ENGINES, TIKTOKEN, Settings
from gangline_dataloader.store.durable import explain_write_errors
from gangline_dataloader.store.manifest import FILE, TEMPLATE, VALIDATION, Manifest, read

ALL, NONE = "all", "none"  # option values that mean no names: ALL for --language, NONE for --clean and --replace
MB = 1e6
# assumed bytes of text per second and core, cleaning included, for byte tokens; a tokenizer reaches a tenth of it
SPEED = 30 * MB


def make_parser(known: Settings | None = None) -> argparse.ArgumentParser:
    """Return the parser of the options; `known`: settings of the store that --append extends, used as defaults."""
    default = known or Settings()
    words = argparse.ArgumentParser(
        prog="gangline data prepare",
        description="Prepare a token store from files of text: clean, deduplicate and tokenise documents, and write "
        "the shards that `train data=tokens` reads. Equal inputs and options give equal bytes with any number of "
        "workers. To continue a killed call, type the same command.",
    )
    what = "files, directories, globs or URLs: text, JSONL, Parquet (default: source of Python's standard library)"
    words.add_argument("inputs", nargs="*", metavar="INPUT", help=what)
    words.add_argument(
        "--out", required=True, metavar="DIR", help="directory of the store: new or empty, or a store with --append"
    )
    more = "append INPUT to the store in DIR, in new shards; an option that is not set has its value from DIR"
    words.add_argument("--append", action="store_true", help=more)
    what = "path of a tokenizer.json, or bytes: one token for each byte (default: bytes)"
    words.add_argument("--tokenizer", default=default.tokenizer, metavar="bytes|FILE", help=what)
    what = (
        "token after each document (default: <|endoftext|>, else eos_token of tokenizer_config.json, else a common "
        "end-of-text name)"
    )
    words.add_argument("--end-of-text", default=default.end_of_text, metavar="TOKEN", help=what)
    what = "token before each document (default: none)"
    words.add_argument("--begin-of-text", default=default.begin_of_text, metavar="TOKEN", help=what)
    field = known.field if known else None
    words.add_argument(
        "--field", default=field, help="field of JSONL or Parquet rows (default: text; with --chat: messages)"
    )
    what = "the field of each row is a list of {role, content}; only the assistant's messages contribute to the loss"
    words.add_argument("--chat", action="store_true", default=default.chat, help=what)
    what = "Jinja chat template (default: chat_template.jinja or tokenizer_config.json next to the tokenizer)"
    words.add_argument("--chat-template", default=default.chat_template, metavar="FILE", help=what)
    rules = f"cleaning rules, applied in this order: {', '.join(RULES)}; or none (default: {','.join(DEFAULT)})"
    words.add_argument("--clean", default=",".join(default.clean) or NONE, metavar="RULES", help=rules)
    codes = "keep only documents in these languages: ISO 639 codes, for example en,de (default: all)"
    words.add_argument("--language", default=",".join(default.languages) or ALL, metavar="CODES", help=codes)
    sure = f"minimum confidence of the language classifier, from 0 to 1 (default: {default.confidence})"
    words.add_argument("--confidence", type=float, metavar="P", help=sure)
    kinds = f"kinds of personal data to replace by fixed words: {', '.join(KINDS)} (default: none)"
    words.add_argument("--replace", default=",".join(default.private) or NONE, metavar="KINDS", help=kinds)
    what = "keep exact duplicates"
    words.add_argument("--keep-duplicates", action="store_true", default=not default.exact, help=what)
    near = "near-deduplication threshold: minimum Jaccard similarity of word 5-grams, by MinHash; typically 0.8"
    words.add_argument("--near-duplicates", type=float, default=default.near, metavar="J", help=near)
    words.add_argument(
        "--validation",
        type=float,
        default=default.validation,
        help="fraction of the documents to hold out for validation (default: %(default)s)",
    )
    words.add_argument(
        "--pack",
        type=int,
        action="append",
        default=[],
        metavar="T",
        help="also write a pack plan of sequences of T tokens, for data.packing=best_fit; repeat for each T. Without "
        "INPUT: only the plan, for an existing store",
    )
    with_what = (
        "tokeniser library (default: tiktoken if it is installed and the tokenizer is a byte-level BPE, else "
        "tokenizers); both give the same tokens"
    )
    words.add_argument("--tokenise-with", choices=ENGINES, default=TIKTOKEN, help=with_what)
    words.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="worker processes (default: all cores)")
    engine = "run the stages with datatrove: on this machine, or as dependent Slurm jobs"
    words.add_argument("--cluster", choices=("local", "slurm"), help=engine)
    count = "datatrove tasks per stage (default: 100 under Slurm, else --workers)"
    words.add_argument("--tasks", type=int, metavar="N", help=count)
    words.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of datatrove's SlurmPipelineExecutor (partition, time, cpus_per_task, ...), or option of sbatch",
    )
    return words


def run(argv: Sequence[str]) -> int:
    """Prepare a token store, or write pack plans of a store, and print a report. Raises UserError for wrong options."""
    arguments = make_parser().parse_args(list(argv))
    check_out(arguments.out)
    if arguments.inputs or not arguments.pack:
        check_not_a_part(Path(arguments.out).expanduser())
    defaults = load_settings(arguments.out) if arguments.append else Settings()
    if arguments.append:
        arguments = make_parser(defaults).parse_args(list(argv))
    if arguments.workers < 1:
        raise UserError(f"--workers {arguments.workers}: expected 1 or more.")
    if arguments.cluster is None and (arguments.tasks is not None or arguments.slurm):
        raise UserError("--tasks and --slurm require --cluster.", "", "--cluster local, or --cluster slurm")
    if arguments.tasks is not None and arguments.tasks < 1:
        raise UserError(f"--tasks {arguments.tasks}: expected 1 or more.")
    if bare := [one for one in arguments.slurm if "=" not in one]:
        raise UserError(f"--slurm {bare[0]}: expected KEY=VALUE.")
    if wrong := [T for T in arguments.pack if not 0 < T < 1 << 24]:
        raise UserError(f"--pack {wrong[0]}: expected tokens per sequence, from 1 to {(1 << 24) - 1}.")
    if arguments.pack and not arguments.inputs:
        read(arguments.out)  # raises UserError for a mistyped --out: without INPUT, --pack needs an existing store
        print("\n".join(plan_all(arguments.out, arguments.pack)))
        return 0
    settings = make_settings(arguments, defaults)
    settings.check()
    notes: list[str] = []
    files = list_inputs(arguments.inputs, arguments.out, notes.append)
    check_first_row(files, settings.field, settings.chat)
    print("\n".join([*notes, estimate(files, settings, arguments.workers, arguments.out)]), flush=True)
    if arguments.cluster is None:
        prepare(
            arguments.inputs,
            arguments.out,
            settings,
            arguments.workers,
            _report_progress,
            arguments.tokenise_with,
            arguments.append,
        )
    elif jobs := prepare_on_cluster(arguments, settings):
        numbers = ", ".join(jobs)
        print(f"submitted jobs {numbers}; when all have ended, type the same command for the report of {arguments.out}")
        return 0
    manifest = read(arguments.out)
    lengths = sorted({*arguments.pack, *(list_lengths(Path(arguments.out).expanduser()) if arguments.append else ())})
    print("\n".join([format_report(manifest, arguments.out), *plan_all(arguments.out, lengths)]))
    return 0


def make_settings(arguments: argparse.Namespace, known: Settings) -> Settings:
    """Return the settings from the options; `known` supplies the default of --confidence.

    Raises UserError for a list with an empty name, and for --confidence without --language.
    """
    languages = _parse_list("--language", arguments.language, ALL)
    if arguments.confidence is not None and not languages:
        raise UserError(
            f"--confidence {arguments.confidence:g} requires --language.",
            "--confidence is the minimum confidence that a document is in one of the languages of --language.",
            f"--language en --confidence {arguments.confidence:g}",
        )
    return Settings(
        tokenizer=arguments.tokenizer,
        end_of_text=arguments.end_of_text,
        begin_of_text=arguments.begin_of_text,
        field=("messages" if arguments.chat else "text") if arguments.field is None else arguments.field,
        chat=arguments.chat,
        chat_template=arguments.chat_template,
        clean=_parse_list("--clean", arguments.clean, NONE),
        languages=languages,
        confidence=known.confidence if arguments.confidence is None else arguments.confidence,
        private=_parse_list("--replace", arguments.replace, NONE),
        exact=not arguments.keep_duplicates,
        near=arguments.near_duplicates,
        validation=arguments.validation,
    )


def _parse_list(option: str, text: str, nothing: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, () for the word `nothing`. Raises UserError for an empty name."""
    names = () if text == nothing else tuple(text.split(","))
    if not all(names):
        raise UserError(
            f"{option} {text!r} contains an empty name.",
            "Separate the names by one comma, without spaces.",
            f"For an empty list:  {option} {nothing}",
        )
    return names


def prepare_on_cluster(arguments: argparse.Namespace, settings: Settings) -> list[str]:
    """Run the preparation with datatrove and return the ids of submitted Slurm jobs; [] if the store is complete."""
    options = dict(one.partition("=")[::2] for one in arguments.slurm)
    tasks = arguments.tasks or (100 if arguments.cluster == "slurm" else arguments.workers)
    jobs: list[str] = []

    def carry(plan: PreparePlan) -> None:
        if arguments.cluster == "slurm":
            jobs.extend(cluster.submit(plan, tasks, options))
        else:
            cluster.run_here(plan, tasks, arguments.workers)

    plan_and_carry_out(arguments.inputs, arguments.out, settings, arguments.tokenise_with, arguments.append, carry)
    return jobs


def load_settings(out: str) -> Settings:
    """Load the settings of a store, with its own tokenizer and chat template. Raises UserError if there is no store."""
    manifest = read(out)
    settings = Settings.from_record(manifest.report.get("settings", {}))
    folder, file = Path(out).expanduser(), manifest.tokenizer.file
    if settings.chat and (folder / TEMPLATE).exists():
        settings = replace(settings, chat_template=str(folder / TEMPLATE))
    return settings if file is None else replace(settings, tokenizer=str(folder / file))


def plan_all(out: str, lengths: Sequence[int]) -> list[str]:
    """Plan packed sequences of each length for a store and its validation part; return a report line for each plan."""
    root = Path(out).expanduser()
    if not lengths:
        return []
    with explain_write_errors(root), lock_store(root):
        folders = [folder for folder in (root, root / VALIDATION) if (folder / FILE).exists()]
        return [_describe_plan(folder, make(folder, read(folder), T)) for folder in folders for T in lengths]


def _describe_plan(folder: Path, plan: PackPlan) -> str:
    share = plan.padding / (plan.rows * (plan.sequence_length + 1))
    return (
        f"{folder}: packed {plan.rows} sequences of {plan.sequence_length} tokens, {share:.3%} padding, "
        f"{plan.documents_cut} documents split"
    )


def estimate(files: Sequence[Input], settings: Settings, workers: int, out: str) -> str:
    """Return a line with the expected duration and store size. Raises UserError if the disk is too small."""
    size = sum(file.size * (4 if file.compression else 1) for file in files)
    per_token = (1, 1) if settings.tokenizer == BYTES else (4, 2)  # (bytes of text, bytes on disk) per token
    peak_bytes = 2 * size * per_token[1] // per_token[0]  # files of the tasks and shards exist at once
    seconds = size / (SPEED if settings.tokenizer == BYTES else SPEED / 10) / workers
    there = os.path.abspath(os.path.expanduser(out))
    while not os.path.exists(there):
        there = os.path.dirname(there)
    free = shutil.disk_usage(there).free
    if peak_bytes > free:
        raise UserError(
            f"--out {out}: the disk has too little free space.",
            f"The preparation needs about {peak_bytes / MB:.0f} MB of disk space, and {free / MB:.0f} MB are free.",
            "Free space, or choose another --out.",
        )
    return (
        f"{len(files)} files, {size / MB:.4g} MB of text: about {max(1, round(seconds))} s on {workers} workers; "
        f"store of {peak_bytes / 2 / MB:.4g} MB, twice as much disk space during the call"
    )


def _report_progress(stage: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{stage} {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def format_report(manifest: Manifest, out: str) -> str:
    """Return a report of the documents kept and dropped in each source, and the command that trains on the store."""
    lines = [f"{manifest.documents} documents, {manifest.tokens / MB:.4g} M tokens for training"]
    for source, count in manifest.report["by_source"].items():
        lines.append(f"  {source}: {count['files']} files, {count['documents']} documents, {count['kept']} kept")
        lines += [f"    {number} dropped: {why}" for why, number in count["dropped"].items()]
        lines += [f"    {number} replaced: {what}" for what, number in count["replaced"].items()]
    if manifest.tokenizer.end_of_text is None:
        lines.append("  no end-of-text token: documents follow each other without separator; see --end-of-text TOKEN")
    size = "" if manifest.vocab_size == 256 else f" model.vocab_size={manifest.vocab_size}"
    return "\n".join([*lines, f"train data=tokens data.path={out}{size}"])
