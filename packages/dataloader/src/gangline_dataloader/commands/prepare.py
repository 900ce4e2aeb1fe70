"""`gangline data prepare INPUT... --out DIR`: make a token store of text, JSONL or Parquet; also plan packed rows."""

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
SPEED = 30 * MB  # bytes of text per second and core for byte tokens, with cleaning; a tenth of that with a tokenizer


def make_parser(known: Settings | None = None) -> argparse.ArgumentParser:
    """Return the parser of the options; `known`: defaults, the settings of the store that --append extends."""
    default = known or Settings()
    words = argparse.ArgumentParser(
        prog="gangline data prepare",
        description="Make a token store of files of text: cleaned, without duplicates, in shards that `train "
        "data=tokens` reads. The same input and options give the same bytes with any number of workers; a call that "
        "was killed continues where it was.",
    )
    what = "files, directories, globs or URLs: text, JSONL, Parquet (default: what `train` reads, Python's own source)"
    words.add_argument("inputs", nargs="*", metavar="INPUT", help=what)
    words.add_argument("--out", required=True, metavar="DIR", help="the store; a directory of its own")
    more = "put INPUT behind what DIR holds, in new shards; options that are not named are those of DIR"
    words.add_argument("--append", action="store_true", help=more)
    what = "a tokenizer.json (default: bytes)"
    words.add_argument("--tokenizer", default=default.tokenizer, metavar="bytes|FILE", help=what)
    what = "behind each document (default: <|endoftext|>, else eos_token of tokenizer_config.json, else a usual name)"
    words.add_argument("--end-of-text", default=default.end_of_text, metavar="TOKEN", help=what)
    what = "before each document (default: none)"
    words.add_argument("--begin-of-text", default=default.begin_of_text, metavar="TOKEN", help=what)
    field = known.field if known else None
    words.add_argument("--field", default=field, help="of JSONL and Parquet (default: text, with --chat messages)")
    what = "each row's field is a list of {role, content}; what the assistant says is learnt, the rest is read only"
    words.add_argument("--chat", action="store_true", default=default.chat, help=what)
    what = "how a conversation becomes text (default: chat_template.jinja or tokenizer_config.json by the tokenizer)"
    words.add_argument("--chat-template", default=default.chat_template, metavar="FILE", help=what)
    rules = f"rules, in order: {', '.join(RULES)}; or none (default: {','.join(DEFAULT)})"
    words.add_argument("--clean", default=",".join(default.clean) or NONE, metavar="RULES", help=rules)
    codes = "keep documents in these languages alone: ISO 639 codes, as en,de (default: all)"
    words.add_argument("--language", default=",".join(default.languages) or ALL, metavar="CODES", help=codes)
    sure = f"how sure of the language, from 0 to 1 (default: {default.confidence})"
    words.add_argument("--confidence", type=float, metavar="P", help=sure)
    kinds = f"put fixed words in the place of these: {', '.join(KINDS)} (default: none)"
    words.add_argument("--replace", default=",".join(default.private) or NONE, metavar="KINDS", help=kinds)
    what = "keep documents that were there before"
    words.add_argument("--keep-duplicates", action="store_true", default=not default.exact, help=what)
    near = (
        "drop documents of which this much is in one before them (resemblance of word 5-shingles, by MinHash), as 0.8"
    )
    words.add_argument("--near-duplicates", type=float, default=default.near, metavar="J", help=near)
    words.add_argument(
        "--validation",
        type=float,
        default=default.validation,
        help="held out of the documents (default: %(default)s)",
    )
    words.add_argument(
        "--pack",
        type=int,
        action="append",
        default=[],
        metavar="T",
        help="plan sequences of T tokens for data.packing=best_fit; again for each T. Without INPUT: of a store that "
        "is there",
    )
    with_what = "tiktoken where it is installed and the tokenizer is a byte-level BPE, else tokenizers: the same tokens"
    words.add_argument("--tokenise-with", choices=ENGINES, default=TIKTOKEN, help=with_what)
    words.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    engine = "carry the stages out by datatrove: here, or as jobs of Slurm that wait for each other"
    words.add_argument("--cluster", choices=("local", "slurm"), help=engine)
    count = "into how many tasks datatrove cuts a stage (default: 100 under Slurm, else as many as workers)"
    words.add_argument("--tasks", type=int, metavar="N", help=count)
    words.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="partition, time, cpus_per_task, mem_per_cpu_gb, ...: of datatrove's SlurmPipelineExecutor, or of sbatch",
    )
    return words


def run(argv: Sequence[str]) -> int:
    """Prepare a token store, or plan packed rows of one, and print a report. Raises UserError for wrong options."""
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
        raise UserError("--tasks and --slurm have no meaning without --cluster.")
    if arguments.tasks is not None and arguments.tasks < 1:
        raise UserError(f"--tasks {arguments.tasks}: expected 1 or more.")
    if bare := [one for one in arguments.slurm if "=" not in one]:
        raise UserError(f"--slurm {bare[0]}: expected KEY=VALUE.")
    if wrong := [T for T in arguments.pack if not 0 < T < 1 << 24]:
        raise UserError(f"--pack {wrong[0]}: expected the tokens of a sequence.")
    if arguments.pack and not arguments.inputs:
        read(arguments.out)  # refuses a mistyped --out: without INPUT, a store of the default input would be made
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
        print(f"jobs {numbers}: when the last has ended, {arguments.out} is whole; the same call says what is in it")
        return 0
    manifest = read(arguments.out)
    lengths = sorted({*arguments.pack, *(list_lengths(Path(arguments.out).expanduser()) if arguments.append else ())})
    print("\n".join([format_report(manifest, arguments.out), *plan_all(arguments.out, lengths)]))
    return 0


def make_settings(arguments: argparse.Namespace, known: Settings) -> Settings:
    """Return the settings from the options; `known` has the default of --confidence.

    Raises UserError for a list with an empty name, and for --confidence without --language.
    """
    languages = _parse_list("--language", arguments.language, ALL)
    if arguments.confidence is not None and not languages:
        raise UserError(
            f"--confidence {arguments.confidence:g} has no meaning without --language.",
            "It says how sure the classifier must be that a document is in one of those languages.",
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
            f"{option} {text!r} has an empty name.",
            "Names are separated by commas, without spaces.",
            f"For no names:  {option} {nothing}",
        )
    return names


def prepare_on_cluster(arguments: argparse.Namespace, settings: Settings) -> list[str]:
    """Run the preparation with datatrove and return the ids of the Slurm jobs that will do it; [] if all is done."""
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
        f"{folder}: {plan.rows} sequences of {plan.sequence_length} tokens packed, {share:.3%} padding, "
        f"{plan.documents_cut} documents cut"
    )


def estimate(files: Sequence[Input], settings: Settings, workers: int, out: str) -> str:
    """Return a line with the expected duration and size of a preparation. Raises UserError if the disk is too small."""
    size = sum(file.size * (4 if file.compression else 1) for file in files)
    per_token = (1, 1) if settings.tokenizer == BYTES else (4, 2)  # (bytes of text, bytes stored) of a token
    peak_bytes = 2 * size * per_token[1] // per_token[0]  # the files of the tasks, and the shards
    seconds = size / (SPEED if settings.tokenizer == BYTES else SPEED / 10) / workers
    there = os.path.abspath(os.path.expanduser(out))
    while not os.path.exists(there):
        there = os.path.dirname(there)
    free = shutil.disk_usage(there).free
    if peak_bytes > free:
        raise UserError(
            f"{out}: the disk is too small.",
            f"About {peak_bytes / MB:.0f} MB are needed at first, {free / MB:.0f} MB are free.",
        )
    return (
        f"{len(files)} files, {size / MB:.4g} MB of text: about {max(1, round(seconds))} s on {workers} workers, "
        f"{peak_bytes / 2 / MB:.4g} MB in the end, twice that on the way"
    )


def _report_progress(stage: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{stage} {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def format_report(manifest: Manifest, out: str) -> str:
    """Return a report of the documents kept and dropped in each source, and the command that trains on the store."""
    lines = [f"{manifest.documents} documents, {manifest.tokens / MB:.4g} M tokens to train on"]
    for source, count in manifest.report["by_source"].items():
        lines.append(f"  {source}: {count['files']} files, {count['documents']} documents, {count['kept']} kept")
        lines += [f"    {number} dropped: {why}" for why, number in count["dropped"].items()]
        lines += [f"    {number} replaced: {what}" for what, number in count["replaced"].items()]
    if manifest.tokenizer.end_of_text is None:
        lines.append("  no end of text: no token between documents; --end-of-text TOKEN names one")
    size = "" if manifest.vocab_size == 256 else f" model.vocab_size={manifest.vocab_size}"
    return "\n".join([*lines, f"train data=tokens data.path={out}{size}"])
