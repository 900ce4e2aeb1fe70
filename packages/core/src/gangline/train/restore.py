"""Resume of a run from a checkpoint (`restore`), and the metadata of a new checkpoint (`capture`)."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import replace

from gangline.checkpoint.base import Checkpointer
from gangline.checkpoint.document import Document
from gangline.checkpoint.id import CheckpointId
from gangline.comm.objects import gather_json
from gangline.config.identity import find_redefined
from gangline.config.serial import to_dict
from gangline.config.values import override
from gangline.errors import BadCheckpoint, UserError
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline.run.directory import find_part_versions
from gangline.run.generation import hold
from gangline.shard import Registry, Shard, is_of_model
from gangline.train.callbacks import call_member, format_choice
from gangline.train.session import Session

LOCAL = "local/"  # prefix of arrays that only one layout can use
OPTIMIZER = "optimizer/"
MEMBERS = ("callback/", "health/")  # prefixes of arrays of callbacks and checks, which may change on a resume
OPTIONAL = (LOCAL, *MEMBERS)  # arrays that a checkpoint may lack or have in addition to the run's


def compute_fingerprint(registry: Registry) -> str:
    """Return a short hash of the model's array names and shapes."""
    lines = sorted(f"{name} {registry[name].shape}" for name in registry if is_of_model(name))
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def capture(session: Session) -> Document:
    """Return the metadata of a new checkpoint: all training state except arrays."""
    states = {
        "optimizer": session.optimizer.state(),
        "precision": session.precision.state(),
        "data": session.source.state(session.cursor),
    }
    theirs = {
        p.replace("/", ".", 1): call_member(session, p, member.state) or {} for p, member in session.members.items()
    }
    return Document(
        step=session.step,
        attempt=session.attempt,
        cursor=session.cursor,
        seed=session.run.seed,
        tokens=session.tokens,
        parts=find_part_versions(session.run),
        states={name: state for name, state in states.items() if state} | theirs,
        data=session.source.compute_fingerprint(),
        model=compute_fingerprint(session.registry),
        base=session.base.record,
        mesh=dict(session.mesh.sizes),
        config=to_dict(session.run),
    )


def restore(session: Session) -> None:
    """Resume from the newest undamaged checkpoint of the run, or begin the run.

    If a checkpoint is damaged, the previous one is used, which starts a new attempt. Raises UserError if the checkpoint
    is of another model or data order, if all checkpoints are damaged, and if attempts.jsonl contradicts them.
    """
    attempts.refuse_damage(session.directory.path)
    session.history = attempts.read(session.directory.path)
    session.attempt = attempts.find_newest(session.history)
    session.comms.world.barrier()  # every rank has read the attempts before rank 0 writes a line
    ids = list_common(session)
    checkpoint = session.checkpointer.find_latest()
    if checkpoint is None and ids:
        raise UserError(
            f"no checkpoint in {session.directory.path} led to attempt {session.attempt}, the newest attempt.",
            f"Checkpoints: {', '.join(map(str, ids))}. A line of {attempts.FILE} is missing or was changed.",
            f"Restore {attempts.FILE} from a copy. {_explain_afresh(session)}",
        )
    if checkpoint is None:
        begin(session, Attempt(session.attempt, None, why="start"))
        _fill_first_values(session, set(session.registry))
        return
    damage: list[str] = []
    while checkpoint is not None:
        bad = load(session, checkpoint)
        if bad is None:
            break
        damage.append(bad)
        session.notes.append(f"{bad}; falling back to the previous checkpoint")
        ids = [id for id in ids if id.step < checkpoint.step]
        checkpoint = attempts.find_latest(session.directory.path, ids)
    if checkpoint is None:
        raise UserError(
            f"no checkpoint in {session.directory.path} can be read.",
            *damage,
            f"To start a new run (new weights):  train from={shlex.quote(str(session.directory.path))}",
        )
    if line := attempts.find_skipped_beyond(session.history, checkpoint, session.cursor):
        raise UserError(
            f"{session.directory.path / attempts.FILE} was changed: attempt {line.attempt} skips the samples from "
            f"{line.skipped_from} to {line.skipped_from + line.skipped - 1}.",
            f"The later checkpoint {checkpoint} has read only up to sample {session.cursor - 1}.",
            f"Restore {attempts.FILE} from a copy. {_explain_afresh(session)}",
        )
    if damage:
        session.attempt += 1
    begin(
        session, Attempt(session.attempt, str(checkpoint), why="; ".join(damage) or "resume", data=session.other_data)
    )
    session.saved = str(checkpoint)


def list_common(session: Session) -> list[CheckpointId]:
    """Return the checkpoints that every rank can list; equal on all ranks, so all try them in the same order."""
    own_ids = session.checkpointer.list()
    everyone = gather_json(session.comms.world, [str(id) for id in own_ids])
    return [id for id in own_ids if all(str(id) in other for other in everyone)]


def begin(session: Session, line: Attempt) -> None:
    """Append a line to attempts.jsonl, durable before any rank continues, and to every rank's history."""
    line = replace(line, time=line.time or attempts.stamp(gather_json(session.comms.world, time.time())[0]))
    if session.comms.rank == 0:
        with hold(session.directory.path):
            attempts.append(session.directory.path, line)
    session.history.append(line)
    session.comms.world.barrier()


def load(session: Session, id: CheckpointId, *, same_run: bool = True, same_data: bool = True) -> str | None:
    """Load a checkpoint into the session on all ranks; return its damage, or None. Raises UserError if it does not fit.

    same_run: refuse a checkpoint of other settings. same_data: refuse a checkpoint of other data.
    """
    bad = ""
    try:
        document = read_document(session.checkpointer, id)
        _check(session, id, document)
        weights_alone = holds_weights_alone(session, id)
        if same_run and not weights_alone:
            _check_settings(session, id, document)
        if same_data:
            check_data(session, id, document)
        stored_shapes = session.checkpointer.read_shapes(id)
        shards, fresh = _select_wanted(session, id, document)
        if weights_alone:
            session.notes.append(f"checkpoint {id} has only weights: the optimizer starts from scratch")
            shards = [shard for shard in shards if not shard.name.startswith(OPTIMIZER)]
    except BadCheckpoint as error:
        bad = f"checkpoint {id}: {error}"
    if damage := agree_on_damage(session, id, bad):  # before `load`, which all ranks must call
        return damage
    _check_leftover(session, id, stored_shapes, shards)
    shards = session.base.fill(shards, stored_shapes, document.base, f"checkpoint {id}")
    try:
        session.checkpointer.load(id, shards, session.registry)
    except BadCheckpoint as error:
        bad = f"checkpoint {id}: {error}"
    if damage := agree_on_damage(session, id, bad):
        return damage
    session.step, session.cursor, session.tokens = document.step, document.cursor, document.tokens
    if not weights_alone:
        session.optimizer.load_state(document.states.get("optimizer", {}))
    session.precision.load_state(document.states.get("precision", {}))
    for place, member in session.members.items():
        state = document.states.get(place.replace("/", ".", 1))
        if state is None:  # reset the state: it may count steps past this checkpoint
            state = deepcopy(session.first_states.get(place))
        if state is not None:
            call_member(session, place, member.load_state, state)
    _fill_first_values(session, fresh)
    return None


def read_document(checkpointer: Checkpointer, id: CheckpointId) -> Document:
    """Return the metadata of a checkpoint. Raises BadCheckpoint, also if it belongs to another checkpoint."""
    try:
        document = Document.of(checkpointer.read_document(id))
        if CheckpointId(document.step, document.attempt) != id:
            raise ValueError(f"it belongs to {CheckpointId(document.step, document.attempt)}")
    except ValueError as error:
        raise BadCheckpoint("the metadata", None, str(id), str(error)) from error
    return document


def _fill_first_values(session: Session, fresh: set[str]) -> None:
    """Call `fill_first_values` of callbacks and checks for the arrays in `fresh`. Called on all ranks."""
    weights = list(session.runtime.shards())
    for place, member in session.members.items():
        if any(name in fresh for name in member.registry or ()):
            theirs = [shard for shard in member.shards() if shard.name in fresh]
            call_member(session, place, member.fill_first_values, theirs, weights)


def holds_weights_alone(session: Session, id: CheckpointId) -> bool:
    """Return whether a checkpoint has only weights: step 0 of a run from pretrained weights, no optimizer state."""
    return id.step == 0 and not any(name.startswith(OPTIMIZER) for name in session.checkpointer.read_shapes(id))


def agree_on_damage(session: Session, id: CheckpointId, bad: str) -> str:
    """Return the damage that any rank has detected; "" on all ranks if no rank has."""
    anywhere = any(gather_json(session.comms.world, bool(bad)))
    return bad or (f"checkpoint {id} is damaged (detected by another rank)" if anywhere else "")


def _select_wanted(session: Session, id: CheckpointId, document: Document) -> tuple[list[Shard], set[str]]:
    """Return (shards to fill, names of optional arrays that the checkpoint lacks or has in another shape).

    Sets the `local/...` arrays among these optional arrays to zero.
    """
    stored_shapes, registry = session.checkpointer.read_shapes(id), session.registry
    fresh = {name for name in registry if name.startswith(OPTIONAL) and stored_shapes.get(name) != registry[name].shape}
    if any(name.startswith(LOCAL) for name in fresh):
        session.notes.append(f"checkpoint {id} lacks arrays of this layout (local/...), which start from zero")
    for place in _list_places(fresh):
        session.notes.append(f"checkpoint {id} lacks arrays of {format_choice(place)}, which start from the weights")
    shards = []
    optimizer = session.optimizer.select_filled(document.states.get("optimizer", {}))
    for shard in (*(shard for shard in session.shards() if not shard.name.startswith(OPTIMIZER)), *optimizer):
        if shard.name not in fresh:
            shards.append(shard)
        elif shard.name.startswith(LOCAL):
            shard.local.zero_()
    return shards, fresh


def _list_places(names: Iterable[str]) -> list[str]:
    """Return the callbacks and checks that own these arrays: "callback/ema"."""
    return sorted({"/".join(name.split("/")[:2]) for name in names if name.startswith(MEMBERS)})


def _check(session: Session, id: CheckpointId, document: Document) -> None:
    stored_shapes, ours = session.checkpointer.read_shapes(id), session.registry
    if document.model and document.model != compute_fingerprint(ours):
        differ = [name for name in ours if is_of_model(name) and stored_shapes.get(name) != ours[name].shape]
        differ += [name for name in stored_shapes if is_of_model(name) and name not in ours]
        example = differ[0] if differ else "array names"
        shape = ours[example].shape if example in ours else "absent"
        what = f"{stored_shapes.get(example, 'absent')} in the checkpoint, {shape} in this run"
        raise UserError(f"checkpoint {id} is of another model.", f"{example}: {what}", _explain_afresh(session))


def _check_leftover(session: Session, id: CheckpointId, stored: Iterable[str], wanted: Iterable[Shard]) -> None:
    """Raise UserError for stored arrays that this run does not use and may not drop. Called by all ranks."""
    loaded = sorted({shard.name for shard in wanted if shard.name not in session.registry})
    loaded_names = {name for names in gather_json(session.comms.world, loaded) for name in names}
    leftovers = [name for name in stored if name not in session.registry and name not in loaded_names]
    refused = [name for name in leftovers if not name.startswith((OPTIMIZER, *OPTIONAL))]
    if own := [name for name in leftovers if name.startswith(OPTIMIZER)]:
        refused += _select_refused(own, session.optimizer.may_drop(own))
    for place in _list_places(leftovers):
        theirs = [name for name in leftovers if name.startswith(f"{place}/")]
        if member := session.members.get(place):
            leaves = call_member(session, place, member.may_drop, theirs)
            refused += _select_refused(theirs, theirs if leaves is None else leaves)
    if refused:
        what = ", ".join(refused[:3])
        raise UserError(f"checkpoint {id} contains state that this run does not have.", what, _explain_afresh(session))
    for place in _list_places(leftovers):
        session.notes.append(
            f"checkpoint {id} contains arrays of {format_choice(place)} that this run does not use: ignored"
        )
    if own:
        session.notes.append(f"checkpoint {id} contains optimizer arrays that this run does not use: ignored")


def _select_refused(names: Iterable[str], leaves: Collection[str]) -> list[str]:
    return [name for name in names if name not in leaves]


def _check_settings(session: Session, id: CheckpointId, document: Document) -> None:
    """Raise UserError if config.yaml differs from the settings that the checkpoint was trained with."""
    if not (changes := find_redefined(document.config, session.run)):
        return
    path = str(session.directory.path)
    before = ", ".join(override(option, old) for option, (old, _) in changes.items())
    now = [override(option, new) for option, (_, new) in changes.items()]
    raise UserError(
        f"checkpoint {id} was saved with {before}.",
        f"{session.directory.config} has {', '.join(now)}: the file was edited or is damaged.",
        "A resumed run cannot change these options: restore the old values in config.yaml.",
        f"A new run with the weights, the optimizer state and the new values:  "
        f"train {shlex.join([f'from={path}', f'weights={path}', *now])}",
    )


def _explain_afresh(session: Session) -> str:
    return f"To start a new run with new weights:  train from={shlex.quote(str(session.directory.path))}"


def check_data(session: Session, id: CheckpointId, document: Document) -> None:
    """Add a note if the data differs from the checkpoint's; raise UserError if the source cannot continue from it."""
    session.other_data = ""
    if not document.data or document.data == session.source.compute_fingerprint():
        return
    if not session.source.continues(document.data, document.cursor, document.states.get("data", {})):
        raise UserError(
            f"checkpoint {id} was trained on other data, or on the same data in another order.",
            f"fingerprint {document.data} in the checkpoint, {session.source.compute_fingerprint()} now "
            f"({session.source.describe()})",
            _explain_afresh(session),
        )
    now = session.source.compute_fingerprint()
    if now != document.data:  # `continues` may have restored the former fingerprint
        session.other_data = f"from sample {document.cursor} on: fingerprint {document.data} before, {now} now"
        session.notes.append(f"the data has changed {session.other_data} ({session.source.describe()})")
