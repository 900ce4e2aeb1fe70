"""The pipeline of `gangline data prepare`: a plan and its stages in sequence, on all cores of this machine.

    tasks   files -> documents, cleaned, tokenised, hashed      many at once
    choice  documents -> kept documents, assigned to shards     one, over all documents
    shards  documents -> shards                                 many at once
    store   move shards into the store, write the manifest      one

Each stage writes its result below the store, so another process on another machine may run the next stage
(`prepare.cluster`). No finished work item is repeated, and the bytes do not depend on the process that did the work.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from gangline import UserError
from gangline.launch.guard import die_with
from gangline.storage.files import lock_folder
from gangline_basics.data.chat_tokens import LOSS_MASK_RULE
from gangline_basics.data.named_tokens import read_special_tokens
from gangline_dataloader.prepare import assemble, choice, known, prepare_plan as plans, task
from gangline_dataloader.prepare.inputs import list_inputs
from gangline_dataloader.prepare.prepare_plan import PLAN, SUBMITTED, WORK, PreparePlan
from gangline_dataloader.prepare.settings import RULES_VERSION, TIKTOKEN, Settings
from gangline_dataloader.store.durable import explain_write_errors
from gangline_dataloader.store.manifest import FILE, TEMPLATE, VALIDATION, Manifest, read, store_around

EXIT_FAILURE = 1  # exit code of a failure that is not the user's mistake, as for a run that lost a rank
Progress = Callable[[str, int, int], None]  # (stage, items done, items in total)


def prepare(
    words: Sequence[str],
    out: str | Path,
    settings: Settings,
    workers: int,
    progress: Progress,
    engine: str = TIKTOKEN,
    append: bool = False,
) -> Manifest:
    """Prepare a token store at `out` from the inputs `words`, or continue an interrupted call; return the manifest.

    engine  tokeniser library, one of settings.ENGINES, without effect on the tokens
    append  whether to append the documents to the store at `out`

    Raises UserError if an input cannot be read, no document is left to train on, or `out` holds other files.
    """
    plan_and_carry_out(words, out, settings, engine, append, lambda plan: carry_out(plan, workers, progress))
    return read(Path(out).expanduser())


@dataclass(frozen=True)
class OlderIdentity:
    """The identity of a call in stores that were prepared before the identity covered file names and sources.

    hash     result of `Settings.compute_older_identity`
    sources  command-line arguments of the files; with the paths of the files they determine the names
    """

    hash: str
    sources: frozenset[str]


def plan_and_carry_out(
    words: Sequence[str],
    out: str | Path,
    settings: Settings,
    engine: str,
    append: bool,
    carry: Callable[[PreparePlan], None],
) -> None:
    """Plan a call and pass the plan to `carry`, unless the store is complete.

    Raises UserError like `prepare`, and for a full disk.
    """
    folder = Path(out).expanduser()
    check_not_a_part(folder)
    settings.check()
    files = list_inputs(words, out)
    identity = settings.compute_identity(files)
    older = OlderIdentity(settings.compute_older_identity(files), frozenset(file.source for file in files))
    if find_finished(folder, identity, append, older):
        if (folder / WORK).exists():
            with lock_store(folder):
                plans.forget(folder, (identity, older.hash))
        return
    if append:
        check_appendable(read(folder), settings, folder)
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with lock_store(folder):
            try:
                carry(plans.begin_plan(folder, identity, settings, engine, files, append))
            except BaseException:
                remove_unused(folder, new_folders)
                raise


def remove_unused(folder: Path, made: Sequence[Path]) -> None:
    """Remove the plan of a call that failed before it wrote anything else, and the directories `made` for it."""
    work = folder / WORK
    parts = any(path.name != PLAN for path in work.rglob("*"))
    if (folder / FILE).exists():  # keep a plan that identifies the validation part of a killed call
        marks = (folder / VALIDATION).exists() and not read(folder).held_out
    else:  # keep the plan next to other files: it shows that prepare made the folder
        marks = any(path != work for path in folder.iterdir())
    if not parts and not marks:
        shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):
            for path in made:
                path.rmdir()


@dataclass(frozen=True)
class PrepareStage:
    """One stage of the pipeline.

    many   whether the stage may have more than one work item
    count  returns the number of work items for a plan, once the earlier stages are done
    work   does one work item
    """

    name: str
    many: bool
    count: Callable[[PreparePlan], int]
    work: Callable[[PreparePlan, int], None]


def _run_task(plan: PreparePlan, number: int) -> None:
    there = len(plan.known)
    if number < there:
        known.work(plan, number)
    else:
        task.work(plan.work, number, plan.dealt[number - there], plan.settings, plan.engine)


def _count_new_shards(plan: PreparePlan) -> int:
    selection = choice.read(plan)
    assert selection is not None, "documents are chosen before shards are written"
    return len(selection.pieces)


STAGES = (
    PrepareStage("task", True, lambda plan: len(plan.known) + len(plan.dealt), _run_task),
    PrepareStage("choice", False, lambda plan: 1, lambda plan, _: choice.choose(plan)),
    PrepareStage("shard", True, _count_new_shards, assemble.write_shard),
    PrepareStage("store", False, lambda plan: 1, lambda plan, _: assemble.publish(plan)),
)


def run_stage_item(store: Path, identity: str, stage: int, number: int) -> None:
    """Run one work item of a stage, in any process: reads the plan from the disk."""
    STAGES[stage].work(plans.read(store, identity), number)


def carry_out(plan: PreparePlan, workers: int, progress: Progress) -> None:
    """Run every stage on `workers` processes. Raises the error of a work item; finished items are kept."""
    with open_pool(workers) as pool:
        for index, stage in enumerate(STAGES):
            total = stage.count(plan)
            progress(stage.name, 0, total)
            if pool is None or total <= 1:
                for number in range(total):
                    stage.work(plan, number)
                    progress(stage.name, number + 1, total)
                continue
            waiting = [pool.submit(run_stage_item, plan.store, plan.identity, index, number) for number in range(total)]
            for count, future in enumerate(as_completed(waiting), 1):
                future.result()
                progress(stage.name, count, total)


@contextmanager
def open_pool(workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Yield a pool of `workers` processes, which start when there is work; None if `workers` is 1.

    Raises UserError with `EXIT_FAILURE` as exit code if a worker process ended before its work did.
    """
    if workers <= 1:
        yield None
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=die_with, initargs=(os.getpid(),))
    try:
        yield pool
    except BrokenProcessPool as error:
        pool.shutdown(wait=False, cancel_futures=True)
        failure = UserError(
            f"a worker process of {workers} was killed or crashed, probably for lack of memory.",
            "Linux kills a process with SIGKILL if memory runs out. Finished work remains on disk.",
            "Type the same command to continue. Fewer --workers need less memory and give the same bytes.",
        )
        failure.exit_code = EXIT_FAILURE
        raise failure from error
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


@contextmanager
def lock_store(folder: Path) -> Iterator[None]:
    """Lock the folder of a store, if its file system has locks. Raises UserError if another call writes to it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(folder.resolve(), seconds=0, required=False))
        except BlockingIOError:
            raise UserError(
                f"another `gangline data prepare` is writing to {folder}.", "Wait until that call has ended."
            ) from None
        if (folder / WORK / SUBMITTED).exists():
            import_module("gangline_dataloader.prepare.cluster").refuse_if_submitted(folder / WORK)
        yield


def find_finished(folder: Path, identity: str, append: bool, older: OlderIdentity) -> Manifest | None:
    """Return the manifest if the call with this identity has been carried out, else None.

    Raises UserError if the folder holds other files; if it holds another store and `append` is false; or if it holds no
    store and `append` is true.
    """
    if not folder.exists() and not append:
        return None
    if (folder / FILE).exists() or append:
        manifest = read(folder)
        if is_made_by(folder, identity) or (
            is_made_by(folder, older.hash) and older.sources <= manifest.sources.keys()
        ):
            return manifest
        if append:
            return None
        raise UserError(
            f"{folder} holds a token store of other inputs or options.",
            f"Sources of that store: {', '.join(manifest.sources) or 'unknown'}.",
            "An input file that changed or was renamed also counts as another input.",
            "Choose another --out, or delete the store. --append appends new documents to the store.",
        )
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / WORK).is_dir()):
        raise UserError(
            f"--out {folder} is a file, or a directory with other files.",
            "A store needs a new or empty directory.",
            "Choose another --out.",
        )
    return None


def check_not_a_part(folder: Path) -> None:
    """Raise UserError if `folder` is the validation part of a store."""
    if store_around(folder) is None:
        return
    store = folder.absolute().parent
    raise UserError(
        f"--out {folder} is the validation part of the store {store}.",
        f"Runs would refuse another store there, because {store}/{FILE} records the checksums of that part.",
        "Choose another --out, and list the new store in validate.sets. To append documents to the store instead: "
        f"gangline data prepare INPUT --out {store} --append",
    )


def is_made_by(folder: Path, identity: str) -> bool:
    """Return whether the call with this identity made the store in `folder`, or appended to it."""
    if not (folder / FILE).exists():
        return False
    report = read(folder).report
    return identity in (report.get("identity"), *(one.get("identity") for one in report.get("appended", [])))


def check_appendable(manifest: Manifest, settings: Settings, folder: Path) -> None:
    """Raise UserError if documents prepared with these settings cannot be appended to the store."""
    codec, tokenizer = settings.open_codec(), manifest.tokenizer
    calls = (manifest.report, *manifest.report.get("appended", []))
    versions = [one.get("rules", 1) for one in calls if Settings.from_record(one.get("settings", {})).filters]
    if settings.filters and (older := [version for version in versions if version != RULES_VERSION]):
        raise UserError(
            f"cannot append to {folder}: the rules of --clean, --language and --replace have changed.",
            f"The store was prepared with version {older[0]} of the rules; this gangline has version {RULES_VERSION}.",
            "Prepare all inputs again, to another --out. Or append without rules: "
            "--clean none --language all --replace none",
        )
    if settings.chat and manifest.shards.loss_xxh3 and manifest.loss_mask_rule != LOSS_MASK_RULE:
        raise UserError(
            f"cannot append to {folder}: the loss masks of the store were computed by an older rule.",
            "Old and new conversations would contribute to the loss differently.",
            "Prepare all inputs again, to another --out.",
        )
    template = settings.load_template()
    if template is not None and manifest.shards.loss_xxh3 and template.source != _read_template(folder):
        raise UserError(
            f"cannot append to {folder}: the chat template of the store differs from {template.name}.",
            "All conversations of a store must be rendered by one chat template.",
            "Leave out --chat-template and --tokenizer: the defaults are the store's template and tokenizer.",
        )
    if template is not None and manifest.shards.loss_xxh3 and template.special != read_special_tokens(folder):
        there, here = (_format_special_tokens(tokens) for tokens in (read_special_tokens(folder), template.special))
        raise UserError(
            f"cannot append to {folder}: the special tokens next to {settings.tokenizer} differ from the store's.",
            f"Store: {there}. This call: {here}. Chat templates insert special tokens.",
            "Leave out --tokenizer: the default is the store's tokenizer.",
        )
    begin = manifest.report.get("settings", {}).get("begin_of_text")
    for name, theirs, own_value in (
        ("tokenizer", tokenizer.identity, codec.identity),
        ("end of text", tokenizer.end_of_text, codec.separator),
        ("--begin-of-text", begin, settings.begin_of_text),
        ("--chat", bool(manifest.shards.loss_xxh3), settings.chat),
    ):
        if theirs != own_value:
            raise UserError(
                f"cannot append to {folder}: {name} is {theirs} in the store and {own_value} in this call.",
                "All documents of a store must be prepared with the same options.",
                "Leave out the option: the default is the value of the store.",
            )


def _format_special_tokens(special: dict[str, str]) -> str:
    return ", ".join(f"{name} {word}" for name, word in sorted(special.items())) or "none"


def _read_template(folder: Path) -> str | None:
    path = folder / TEMPLATE
    return path.read_bytes().decode() if path.exists() else None
