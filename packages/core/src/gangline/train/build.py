"""Session of a run, built from its configuration in one order: model, strategy, weights, optimizer, data, restore."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from gangline.checkpoint.base import Checkpointer
from gangline.checkpoint.base_weights import BaseWeights
from gangline.checkpoint.id import CheckpointId
from gangline.comm.base import Comm, Comms
from gangline.comm.objects import gather_json
from gangline.config.schema import Run
from gangline.config.validation import build_validation_sets
from gangline.data.base import DataSource
from gangline.data.reader import ReadPlace
from gangline.errors import UserError
from gangline.launch.network import name_of_this_node
from gangline.mesh import AXES, DATA_AXES, Mesh
from gangline.model.compose import Composed
from gangline.model.flops import count_parameters
from gangline.model.init_weights import check_pretrained_names, draw_weights
from gangline.plugin import registry
from gangline.precision import Precision
from gangline.run.directory import RunDirectory
from gangline.run.events import Events
from gangline.run.generation import read_generation
from gangline.runtime import Job, Runtime
from gangline.shard import Places
from gangline.train.agree import check_same_data
from gangline.train.batches import Batches
from gangline.train.begin_with_weights import begin_with_weights
from gangline.train.callbacks import attach, identify_code
from gangline.train.held_out import check_held_out
from gangline.train.recompute_and_compile import make_finish
from gangline.train.report import Reporter
from gangline.train.restore import restore
from gangline.train.session import Session

LARGE = 100e6  # number of parameters from which building a model takes seconds


def choose_device(run: Run) -> torch.device:
    """Return this rank's device, and make it current: the device that the run names, else its GPU, else the CPU."""
    name = run.job.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        # Modulo, because some schedulers show each task only its own GPU.
        local = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
        device = torch.device("cuda", local if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def choose_micro_size(run: Run, width: int, mesh: Mesh) -> int:
    """Return the number of sequences in one microbatch; the strategy chooses it if the run leaves it unset."""
    share = run.batch.global_size // width
    return run.batch.micro_size or share // run.parallel.count_microbatches(share, mesh)


def build_source(run: Run, split: str) -> DataSource:
    """Build the run's data source for one split."""
    return registry.build(run.data, run, split)


def build_peers(source: DataSource, place: ReadPlace, mesh: Mesh, comms: Comms) -> Comm | None:
    """Return the Comm of the ranks with an equal share of the batch, if one rank reads for all; None: each reads."""
    if not source.shared or place.width != mesh.size(*DATA_AXES):
        return None
    return comms.get_comm(*(axis for axis in AXES if axis not in DATA_AXES))


def build_held_out_sources(run: Run) -> dict[str, DataSource]:
    """Build the validation sources: the held-out part of the run's own data under "", then the sets by name.

    Raises UserError, which names the set, for a set that cannot be built, or has other tokens than the run's own data.
    """
    if not run.validate.every:
        return {}
    own = build_source(run, "validation")
    sources, tokenizer = {"": own}, own.identify_tokenizer()
    for name, config in build_validation_sets(run).items():
        try:
            sources[name] = build_source(replace(run, data=config), "validation")
        except UserError as error:
            raise UserError(f"validate.sets.{name}: {error.what}", *error.details) from error
        theirs = sources[name].identify_tokenizer()
        if None not in (tokenizer, theirs) and theirs != tokenizer:
            raise UserError(
                f"validate.sets.{name} has another tokenizer than the training data.",
                f"The set has {theirs}, the training data has {tokenizer}: equal token ids would mean different text.",
                "Prepare the set with the tokenizer and the end-of-text token of the training data.",
            )
    return sources


def build(run: Run, directory: RunDirectory, mesh: Mesh, comms: Comms, device: torch.device) -> Session:
    """Build every part and restore the newest checkpoint, if there is one. Called by all ranks."""
    events, composed = Events(directory.path if comms.rank == 0 else None, read_generation()), Composed.of(run)
    nodes = gather_json(comms.world, name_of_this_node())
    checks = identify_code(run) if comms.rank == 0 else {}
    if comms.rank == 0:
        announce(composed, directory, comms.world.size)
    events.write("start", processes=comms.world.size, mesh=dict(mesh.sizes), nodes=nodes, checks=checks)
    with events.record_error():
        with events.enter_phase("build"):
            session = assemble(composed, directory, mesh, comms, device)
            session.events, session.nodes = events, nodes
            check_same_data(comms.world, list_sources(session))
            attach(session)
            check_replicas(session)
        with events.enter_phase("restore"):
            if not begin_with_weights(session):
                restore(session)
            check_held_out(session)
            leave_out_base(session)
    return session


def check_replicas(s: Session) -> None:
    """Raise UserError if a checkpoint would mix replicas that differ (`Runtime.differs`); ValueError for other axes."""
    if unknown := set(s.runtime.differs).difference(s.mesh.axes):
        raise ValueError(f"{type(s.runtime).__name__}.differs has {sorted(unknown)}, not in the axes {s.mesh.axes}")
    for name, layout in s.registry.layouts.items() if s.runtime.differs else ():
        apart = set(s.runtime.differs).intersection(Places(s.mesh, layout).free) - set(layout.differs)
        if any(s.mesh.size(axis) > 1 for axis in apart):
            strategy = registry.installed().find_part(s.run.parallel).part.name
            raise UserError(
                f"the array {name} is registered as equal on all ranks along {', '.join(sorted(apart))}.",
                f"With parallel={strategy} its values differ between synchronizations; a checkpoint would mix them.",
                "Choose a part whose arrays are sharded like the weights (`Registry.add_like`), or another strategy.",
            )


def announce(composed: Composed, directory: RunDirectory, ranks: int) -> None:
    """Print model, size and ranks before a large model is built, because trackers start only after the build."""
    count = count_parameters(composed.tree)
    if count >= LARGE:
        name = registry.installed().find_part(composed.run.model).part.name
        processes = f"{ranks} process{'es' * (ranks > 1)}"
        print(f"building {name}, {count / 1e6:.4g} M parameters, on {processes}, in {directory.path}", flush=True)


def leave_out_base(s: Session) -> None:
    """Leave the base weights out of later saves, unless `checkpoint.save_frozen`. Called by all ranks."""
    if not s.run.checkpoint.save_frozen and s.checkpointer.keeps:
        came = None if s.saved is None else CheckpointId.parse(s.saved)
        s.base.leave_out(list(s.runtime.shards()), () if came is None else s.checkpointer.read_shapes(came))


def list_sources(session: Session) -> dict[str, DataSource]:
    """Return the data sources of the run by name: train, validation, and the validation sets."""
    held_out = {name: batches.source for name, batches in session.validation_sets.items()}
    if session.validation is not None:
        held_out["validation"] = session.validation.source
    return {"train": session.source, **held_out}


def list_notices(run: Run, mesh: Mesh) -> list[str]:
    """Return warnings about options that work but are probably not intended."""
    notices = [note for _, config in run.iterate_parts() for note in config.list_notices(run)]
    if not run.gradients.plain and mesh.size(*DATA_AXES, "cp") == 1:
        name = registry.installed().find_part(run.gradients).part.name
        notices.append(f"gradients={name} has no effect: the run has only one data-parallel rank")
    return notices


def assemble(composed: Composed, directory: RunDirectory, mesh: Mesh, comms: Comms, device: torch.device) -> Session:
    """Build every part, without restoring a checkpoint or attaching callbacks."""
    run, tree, plan = composed.run, composed.tree, composed.plan
    precision: Precision = registry.build(run.precision, run)
    finish = make_finish(run.job.recompute, run.job.compile, run.job.recompute_every, plan.seams)
    runtime: Runtime = registry.build(run.parallel, Job(composed, mesh, comms, precision, finish))
    checkpointer: Checkpointer = registry.build(run.checkpoint, run, comms.store)
    if checkpointer.find_latest() is None and run.job.weights is None:  # else the weights come from a checkpoint
        check_pretrained_names(run, tree, plan)
        draw_weights(run, runtime.shards(), plan)
    optimizer = registry.build(run.optimizer, run, runtime)
    source = build_source(run, "train")
    micro = choose_micro_size(run, runtime.data_coordinate[1], mesh)
    place = ReadPlace(*runtime.data_coordinate, run.batch.global_size, micro, device, comms)
    held_out = {
        name: Batches(source, place, build_peers(source, place, mesh, comms))
        for name, source in build_held_out_sources(run).items()
    }
    return Session(
        composed=composed,
        base=BaseWeights(run, tree, plan, comms),
        directory=directory,
        mesh=mesh,
        comms=comms,
        device=device,
        precision=precision,
        runtime=runtime,
        optimizer=optimizer,
        schedule=registry.build(run.schedule, run),
        source=source,
        batches=Batches(source, place, build_peers(source, place, mesh, comms)),
        validation=held_out.pop("", None),
        validation_sets=held_out,
        checkpointer=checkpointer,
        callbacks={name: registry.build(config, run) for name, config in run.callback.items()},
        health={name: registry.build(config, run) for name, config in run.health.items()},
        reporter=Reporter.build(run, tree, plan, mesh, comms, device, precision),
        notes=list_notices(run, mesh) if comms.rank == 0 else [],
    )
