"""Toy checkpointer: one .npy file per primary box, one index, and a rename as commit."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gangline.checkpoint.base import Checkpointer, SaveFailed, SaveHandle, SaveRequest
from gangline.checkpoint.id import CheckpointId
from gangline.checkpoint.retention import find_superfluous
from gangline.comm.base import Store
from gangline.config.schema import Run
from gangline.errors import BadCheckpoint, UserError
from gangline.shard import Box, Registry, Shard, name_dtype
from gangline.storage.files import write_whole
from gangline_testkit.toys.plugin import Files

Index = dict[str, list[dict[str, Any]]]  # array -> boxes with offset, shape, file and checksum


class FilesCheckpointer(Checkpointer):
    """Checkpointer with .npy files in `checkpoints/<id>`, and an index of their boxes and CRC-32 checksums.

    Ranks synchronise through the job store. Each rank reports its durable files; rank 0 then writes the index and
    renames the directory. There are no collectives: after the death of a rank, the others get a timeout of the store.
    """

    def __init__(self, config: Files, run: Run, store: Store | None) -> None:
        self._run_dir, self.store = run.job.dir or ".", store
        self.directory = Path(self._run_dir, "checkpoints")
        self.turn, self.keep_last = 0, config.keep_last

    @property
    def run_dir(self) -> str:
        return self._run_dir

    def save(
        self, request: SaveRequest, shards: Sequence[Shard], registry: Registry, document: dict[str, Any]
    ) -> SaveHandle:
        """Write the files of every rank, and rename the directory on rank 0. Raises SaveFailed on all ranks."""
        id = CheckpointId(request.step, document["attempt"])
        final = self.directory / str(id)
        self.turn += 1
        rank, world = int(os.environ.get("RANK", "0")), registry.mesh.world
        if rank == 0:
            shutil.rmtree(final.with_name(f".{id}"), ignore_errors=True)
            final.with_name(f".{id}").mkdir(parents=True)
        self.meet(f"begin-{id}", world, id)
        error = (
            "the checkpoint already exists"
            if final.exists()
            else self.write_boxes(final.with_name(f".{id}"), rank, shards)
        )
        self.tell(f"error-{id}-{rank}", error)
        self.meet(f"written-{id}", world, id)
        errors = [self.share_status(f"error-{id}-{other}", error) for other in range(world)]
        if not any(errors) and rank == 0:
            errors = [self.commit(final, document)]
        self.tell(f"error-{id}", errors[0] if rank == 0 else "")
        self.meet(f"over-{id}", world, id)
        why = next((e for e in [*errors, self.share_status(f"error-{id}", errors[0])] if e), "")
        if why:
            raise SaveFailed(id, why)
        return SaveHandle(id).finish()

    def write_boxes(self, directory: Path, rank: int, shards: Sequence[Shard]) -> str:
        """Write this rank's primary boxes and their index entries, and return the error text, or ""."""
        index: Index = {}
        try:
            for number, shard in enumerate(shard for shard in shards if shard.primary):
                file = f"{rank}-{number}.npy"
                content = _encode(shard.local)
                write_whole(directory / file, content)
                index.setdefault(shard.name, []).append(
                    {
                        "offset": shard.offset,
                        "shape": tuple(shard.local.shape),
                        "whole": shard.global_shape,
                        "dtype": name_dtype(shard.dtype),
                        "file": file,
                        "checksum": zlib.crc32(content),
                    }
                )
            write_whole(directory / f"{rank}.json", json.dumps(index).encode())
        except OSError as error:
            return str(error)
        return ""

    def commit(self, final: Path, document: dict[str, Any]) -> str:
        """Merge the index entries of all ranks, and rename the directory, on rank 0. Returns the error text, or ""."""
        draft = final.with_name(f".{final.name}")
        try:
            whole: Index = {}
            for part in sorted(draft.glob("*.json")):
                for name, boxes in json.loads(part.read_bytes()).items():
                    whole.setdefault(name, []).extend(boxes)
            text = json.dumps({"arrays": whole, "document": document})
            write_whole(draft / "index", f"{zlib.crc32(text.encode())}\n{text}".encode())
            draft.rename(final)
            if self.keep_last is not None:
                for old in find_superfluous(self.run_dir, self.list(), self.keep_last, self.explain_damage):
                    shutil.rmtree(self.directory / str(old))
        except OSError as error:
            return str(error)
        return ""

    def explain_damage(self, id: CheckpointId) -> str:
        """Read every byte of a checkpoint, and return the damage as text, or ""."""
        try:
            index = self.read_index(id)
            for name, boxes in index["arrays"].items():
                for entry in boxes:
                    _read_checked(
                        name, Box(tuple(entry["offset"]), tuple(entry["shape"])), entry, self.directory / str(id)
                    )
        except BadCheckpoint as bad:
            return str(bad)
        return ""

    # --- agreement of ranks by the store -----------------------------------------------------------------------------

    def tell(self, key: str, text: str) -> None:
        if self.store is not None:
            self.store.set(f"files/{self.turn}/{key}", text or "fine")

    def share_status(self, key: str, status: str) -> str:
        if self.store is None:
            return status
        text = self.store.get(f"files/{self.turn}/{key}").decode()
        return "" if text == "fine" else text

    def meet(self, where: str, world: int, id: CheckpointId) -> None:
        """Wait until all ranks have called this. The timeout of the store ends a wait for a dead rank."""
        if self.store is None or world == 1:
            return
        key = f"files/{self.turn}/{where}"
        if self.store.add(key, 1) == world:
            self.store.set(f"{key}/all", "here")
        self.store.get(f"{key}/all")

    # --- reading -----------------------------------------------------------------------------------------------------

    def list(self) -> list[CheckpointId]:
        ids = [CheckpointId.parse(path.name) for path in self.directory.glob("step-*")]
        return sorted(id for id in ids if id is not None)

    def read_index(self, id: CheckpointId) -> dict[str, Any]:
        """Return the index of a checkpoint, with the file of each box. Raises BadCheckpoint."""
        path = self.directory / str(id) / "index"
        try:
            checksum, _, text = path.read_text().partition("\n")
            if zlib.crc32(text.encode()) != int(checksum):
                raise BadCheckpoint("every array", None, path, "the CRC-32 checksum differs")
            index = json.loads(text)
            if not self.is_of(index["document"], id):
                raise BadCheckpoint("every array", None, path, "the index states the id of another checkpoint")
            return index
        except (OSError, ValueError) as error:
            raise BadCheckpoint("every array", None, path, str(error)) from error

    def is_of(self, document: dict[str, Any], id: CheckpointId) -> bool:
        """Return whether a document states this checkpoint id; not after a rename of the directory."""
        return CheckpointId(document["step"], document["attempt"]) == id

    def read_document(self, id: CheckpointId) -> dict[str, Any]:
        return self.read_index(id)["document"]

    def read_shapes(self, id: CheckpointId) -> dict[str, tuple[int, ...]]:
        return {name: tuple(boxes[0]["whole"]) for name, boxes in self.read_index(id)["arrays"].items()}

    def load(self, id: CheckpointId, shards: Iterable[Shard], registry: Registry) -> None:
        """Fill the shards. Raises BadCheckpoint on all ranks if one rank finds damage."""
        self.turn += 1
        rank, error = int(os.environ.get("RANK", "0")), None
        try:
            self.fill_all(id, shards)
        except BadCheckpoint as damage:
            error = damage
        self.tell(f"damage-{rank}", str(error or ""))
        self.meet("loaded", registry.mesh.world, id)
        for other in range(registry.mesh.world):
            if (status := self.share_status(f"damage-{other}", str(error or ""))) and error is None:
                error = BadCheckpoint("an array", None, self.directory / str(id), f"rank {other} reports: {status}")
        if error is not None:
            raise error

    def fill_all(self, id: CheckpointId, shards: Iterable[Shard]) -> None:
        """Fill each shard from the stored boxes that it overlaps.

        Raises UserError for an array that is missing or has another shape.
        """
        arrays = self.read_index(id)["arrays"]
        for shard in shards:
            boxes = arrays.get(shard.name)
            if boxes is None:
                raise UserError(f"checkpoint {id} does not have the array {shard.name}.")
            if tuple(boxes[0]["whole"]) != tuple(shard.global_shape):
                raise UserError(
                    f"{shard.name} has shape {boxes[0]['whole']} in checkpoint {id}, expected {shard.global_shape}."
                )
            for entry in boxes:
                self.fill(shard, Box(tuple(entry["offset"]), tuple(entry["shape"])), entry, self.directory / str(id))

    def fill(self, shard: Shard, box: Box, kept: dict[str, Any], directory: Path) -> None:
        """Copy the intersection of a stored box and a shard into the shard."""
        common = box.intersect(shard.box)
        if common is None:
            return
        content = _read_checked(shard.name, box, kept, directory)
        values = _decode(content, kept["dtype"], box.shape)
        shard.local.detach()[common.slice_within(shard.box)] = values[common.slice_within(box)].to(shard.dtype)


def _read_checked(name: str, box: Box, kept: dict[str, Any], directory: Path) -> bytes:
    """Return the bytes of the file of a stored box. Raises BadCheckpoint if the checksum differs."""
    path = directory / kept["file"]
    content = path.read_bytes() if path.exists() else b""
    if zlib.crc32(content) != kept["checksum"]:
        raise BadCheckpoint(name, box.limits, path, "the CRC-32 checksum differs")
    return content


def _encode(local: torch.Tensor) -> bytes:
    buffer = BytesIO()
    raw = local.detach().contiguous().reshape(-1).view(torch.uint8)  # numpy has no bfloat16
    np.save(buffer, raw.numpy())
    return buffer.getvalue()


def _decode(content: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.from_numpy(np.load(BytesIO(content)))
    return raw.view(getattr(torch, dtype)).view(shape)
