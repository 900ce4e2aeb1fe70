"""Files of torch.distributed.checkpoint, with two additions: checksums, and an atomic commit.

A checkpoint is written into `.tmp-<id>`, every file is flushed to the disk, and rank 0 renames the directory when all
ranks have finished. A directory under its final name is therefore complete, and DCP's own reader can read it.

    .metadata         DCP's table of chunks, a pickle: read by an unpickler that accepts only the classes of the table
    __<rank>_0.distcp  one file per rank, one record per box (the output of torch.save)
    document.json     everything that is not an array
    checksums.json    CRC-32 of each file and record; a directory without this file is not a checkpoint
"""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import zlib
from dataclasses import dataclass, is_dataclass, replace
from io import BytesIO
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, LoadPlan, Metadata, ReadItem, SavePlan
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gangline.checkpoint.id import CheckpointId
from gangline.errors import BadCheckpoint, UserError
from gangline.run.generation import hold
from gangline.storage.files import open_regular, read_regular, sync_folder, write_whole
from gangline_basics.checkpoint.planners import get_arrays

METADATA, DOCUMENT, CHECKSUMS = ".metadata", "document.json", "checksums.json"
# name prefixes of directories that are being written, and that are being deleted
TEMPORARY, CONDEMNED = ".tmp-", ".old-"
TABLE_BYTES = 1 << 32  # maximum size of .metadata, document.json and checksums.json
_RECORDS = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True)
class CheckedWrite(WriteResult):
    """Result of writing one box, with the CRC-32 of its record."""

    checksum: int = 0


class DcpWriter(FileSystemWriter):
    """Writer of one checkpoint; the coordinator's `finish` makes the checkpoint visible."""

    def __init__(self, final: Path, document: dict[str, Any]) -> None:
        self.final, self.document = final, document
        super().__init__(final.with_name(TEMPORARY + final.name), sync_files=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the temporary directory on rank 0, before any rank writes. Raises FileExistsError for a duplicate."""
        if self.final.exists():
            raise FileExistsError(f"{self.final} exists, and checkpoints are never overwritten")
        clear_leftovers(self.final.parent)
        os.makedirs(self.path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        """Write this rank's file, with checksums. Raises the OSError that torch wraps in a RuntimeError."""
        try:
            results = super().write_data(plan, planner).value() if plan.items else []
        except RuntimeError as error:
            os_error = _find_os_error(error)
            if os_error is None:
                raise
            raise os_error from None
        future: Future = Future()
        future.set_result(_add_checksums(Path(self.path), results))
        return future

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata files and rename the directory, on rank 0, after all ranks have flushed their files."""
        super().finish(metadata, results)
        path = Path(self.path)
        records: dict[str, list] = {}
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, CheckedWrite)
            place = result.storage_data
            records.setdefault(place.relative_path, []).append([place.offset, place.length, result.checksum])
        write_whole(path / DOCUMENT, json.dumps(self.document, indent=1).encode())
        files = {name: zlib.crc32((path / name).read_bytes()) for name in (METADATA, DOCUMENT)}
        write_whole(path / CHECKSUMS, json.dumps({"files": files, "records": records}).encode())
        sync_folder(path)
        with hold(self.final.parent.parent):
            path.rename(self.final)
        sync_folder(self.final.parent)


def _find_os_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that caused an error, or None; torch's zip writer reports a failed write as a wrong offset."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def clear_leftovers(directory: Path) -> None:
    """Delete the directories that interrupted saves and interrupted deletions have left."""
    for prefix in (TEMPORARY, CONDEMNED):
        for path in directory.glob(prefix + "*"):
            rmtree(path, ignore_errors=True)


def _add_checksums(directory: Path, results: list[WriteResult]) -> list[CheckedWrite]:
    """Return the write results with the CRC-32 of each record, which is read back from its file (in the page cache)."""
    writes = []
    for result in results:
        place = result.storage_data
        with (directory / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            checksum, rest = 0, place.length
            while rest > 0 and (content := file.read(min(rest, 1 << 22))):
                checksum, rest = zlib.crc32(content, checksum), rest - len(content)
        writes.append(CheckedWrite(result.index, result.size_in_bytes, place, checksum))
    return writes


class ChecksumFile:
    """Content of one checkpoint's checksums.json. Raises BadCheckpoint if the file cannot be read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / CHECKSUMS
        try:
            content = json.loads(read_regular(path, TABLE_BYTES))
            self.files = {str(name): int(value) for name, value in content["files"].items()}
            self.records = {
                (str(name), int(offset), int(length)): int(value)
                for name, rows in content["records"].items()
                for offset, length, value in rows
            }
            if unknown := [name for name in content["records"] if not _RECORDS.fullmatch(name)]:
                raise ValueError(f"the record file {unknown[0]!r} must be named __<n>_<n>.distcp")
        except (
            OSError,
            UserError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            OverflowError,
        ) as error:
            raise BadCheckpoint("every array", None, path, _format_first_line(error)) from error

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises BadCheckpoint if it is unreadable or its checksum differs."""
        path = self.directory / name
        try:
            content = read_regular(path, TABLE_BYTES)
        except (OSError, UserError) as error:
            raise BadCheckpoint("every array", None, path, _format_first_line(error)) from error
        if zlib.crc32(content) != self.files.get(name):
            raise BadCheckpoint("every array", None, path, f"the checksum of the file differs from {CHECKSUMS}")
        return content

    def read_document(self) -> dict[str, Any]:
        """Return the content of document.json. Raises BadCheckpoint if it is damaged or of another checkpoint."""
        try:
            document = json.loads(self.read(DOCUMENT))
            says = CheckpointId(document["step"], document["attempt"])
            if says != CheckpointId.parse(self.directory.name):
                raise ValueError(f"document.json belongs to checkpoint {says}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadCheckpoint("every array", None, self.directory / DOCUMENT, str(error)) from error
        return document


def _format_first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def explain_missing_files(directory: Path) -> str:
    """Return why a checkpoint is incomplete, or "" if its JSON files are valid and no record file is too short."""
    try:
        checksums = ChecksumFile(directory)
        checksums.read_document()
        checksums.read(METADATA)
        ends: dict[str, int] = {}
        for name, offset, length in checksums.records:
            ends[name] = max(ends.get(name, 0), offset + length)
        for name, end in ends.items():
            there = (directory / name).stat().st_size
            if there < end:
                return f"{name} has {there} bytes, but the records in {CHECKSUMS} end at byte {end}"
    except BadCheckpoint as bad:
        return str(bad)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    return ""


_TABLE = {  # every class and function in the pickle of DCP's table of chunks, by module
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class _TableUnpickler(pickle._Unpickler):
    """Unpickler of DCP's table of chunks. It rejects a pickle at the first name that is not in `_TABLE`.

    State is set only on instances of the table's dataclasses. State of a class, a function or an enumeration member
    would change how this process treats every other checkpoint. Only the pure-Python unpickler can check this. It reads
    a table of 20,000 chunks in about 2 s; the C unpickler needs 0.5 s.
    """

    stack: list[Any]

    def _build(self) -> None:
        target = self.stack[-2]
        if not is_dataclass(type(target)):
            raise pickle.UnpicklingError(
                f"the pickle sets the state of {target!r}, which is not an entry of DCP's table of chunks"
            )
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)  # type: ignore[arg-type]

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}  # type: ignore[dict-item]

    def find_class(self, module: str, name: str) -> Any:
        if name in _TABLE.get(module, ()) or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the pickle names {module}.{name}, which DCP's table of chunks never contains")


def _unpickle(content: bytes, path: Path) -> Metadata:
    try:
        table = _TableUnpickler(BytesIO(content)).load()
        if not isinstance(table, Metadata):
            raise pickle.UnpicklingError(f"the pickle contains a {type(table).__name__}, not a Metadata")
        for place in table.storage_data.values():
            numbers = (place.offset, place.length)
            if type(place.relative_path) is not str or any(type(n) is not int or n < 0 for n in numbers):
                raise pickle.UnpicklingError(f"the path, offset or length of a record is invalid: {place!r}")
    except Exception as error:  # a broken pickle can raise any exception
        raise BadCheckpoint("every array", None, path, f"{type(error).__name__}: {error}") from error
    return table


class DcpReader(FileSystemReader):
    """Reader of one checkpoint: it reads each record once and verifies the record's checksum."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self.damage: BadCheckpoint | None = None
        self._table: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Return the table of chunks, read once.

        DCP tries rank-local metadata if this raises, so the error is stored and `set_up_storage_reader` raises it.
        """
        try:
            if self._table is None:
                self.checksums = ChecksumFile(self.directory)
                self.checksums.read_document()
                self._table = _unpickle(self.checksums.read(METADATA), self.directory / METADATA)
        except BadCheckpoint as damage:
            self.damage = damage
            return Metadata({}, storage_data={})
        self.damage = None
        return replace(self._table, storage_meta=StorageMeta(load_id=self.load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare to read. Raises BadCheckpoint for damage that `read_metadata` found."""
        if self.damage is not None:
            raise self.damage
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self.stored = get_arrays(metadata)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reads: dict[Any, list[ReadItem]] = {}
        for item in plan.items:
            reads.setdefault(item.storage_index, []).append(item)
        for items in reads.values():
            record = self._record(items[0])
            for item in items:
                place = zip(item.storage_offsets, item.lengths, strict=True)
                target = planner.resolve_tensor(item)
                target.copy_(record[tuple(slice(a, a + n) for a, n in place)])
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _record(self, item: ReadItem) -> torch.Tensor:
        """Return the stored box from which an item reads. Raises BadCheckpoint for a damaged record."""
        place = self.storage_data[item.storage_index]
        path = self.directory / place.relative_path
        checksum = self.checksums.records.get((place.relative_path, place.offset, place.length))
        why = f"the checksum of the record differs from {CHECKSUMS}"
        try:
            if checksum is None:
                raise UserError(f"the checksum of the record is missing in {CHECKSUMS}")
            with open_regular(path, sys.maxsize) as file:
                missing = place.offset + place.length - os.fstat(file.fileno()).st_size
                if missing > 0:
                    raise UserError(f"the file is {missing} bytes too short")
                file.seek(place.offset)
                content = file.read(place.length)
            if zlib.crc32(content) == checksum:
                return torch.load(BytesIO(content), map_location="cpu", weights_only=True)
        except (OSError, UserError) as error:
            why = _format_first_line(error)
        index = item.storage_index
        chunk = next(c for c in self.stored[index.fqn].chunks if c.offsets == index.offset)
        box = tuple((a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        raise BadCheckpoint(index.fqn, box, path, why)
