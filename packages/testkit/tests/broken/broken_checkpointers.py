"""Checkpointers with one fault each, otherwise equal to the toy `files`."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future
from dataclasses import replace

from gangline.checkpoint.base import SaveHandle
from gangline.checkpoint.id import CheckpointId
from gangline.errors import BadCheckpoint
from gangline_testkit.toys.files import FilesCheckpointer, _decode


class DropsOptimizer(FilesCheckpointer):
    def save(self, request, shards, registry, document):
        return super().save(request, [s for s in shards if not s.name.startswith("optimizer/")], registry, document)


class IgnoresOffsets(FilesCheckpointer):
    """Fills every shard from the first rows of a file, without its offset."""

    def fill(self, shard, box, kept, directory):
        values = _decode((directory / kept["file"]).read_bytes(), kept["dtype"], box.shape)
        place = tuple(slice(0, min(a, b)) for a, b in zip(values.shape, shard.local.shape, strict=True))
        shard.local.detach()[place] = values[place]


class Lazy(FilesCheckpointer):
    """Reads the shards only when a caller waits for the checkpoint, not during `save`."""

    def save(self, request, shards, registry, document):
        handle = SaveHandle(CheckpointId(request.step, document["attempt"]))
        handle.visible = Late(lambda: super(Lazy, self).save(request, shards, registry, document), handle)
        return handle


class Late(Future):
    """Future that saves when its result is requested."""

    def __init__(self, save, handle):
        super().__init__()
        self.save, self.handle = save, handle

    def result(self, timeout=None):
        self.save()
        self.handle.finish()


class VisibleTooSoon(FilesCheckpointer):
    """Reports a checkpoint as visible after staging, before any array is written."""

    def save(self, request, shards, registry, document):
        staged = [replace(shard, local=shard.local.detach().clone()) for shard in shards]
        self.rest = lambda: super(VisibleTooSoon, self).save(request, staged, registry, document)
        return SaveHandle(CheckpointId(request.step, document["attempt"])).finish()

    def close(self):
        vars(self).get("rest", lambda: None)()


class SettlesEarly(FilesCheckpointer):
    """Resolves `settled` before `visible`."""

    def save(self, request, shards, registry, document):
        handle = SaveHandle(super().save(request, shards, registry, document).id)
        handle.settled.set_result(None)
        threading.Timer(0.2, handle.visible.set_result, (None,)).start()
        return handle


class CommitsEarly(FilesCheckpointer):
    """Gives the checkpoint its final name before its boxes are written."""

    def write_boxes(self, directory, rank, shards):
        final = directory.with_name(directory.name[1:])
        self.meet("early", 2 if rank or self.others() else 1, None)
        if rank == 0:
            directory.rename(final)
            directory.symlink_to(final, target_is_directory=True)
        self.meet("renamed", 2 if rank or self.others() else 1, None)
        return super().write_boxes(final, rank, shards)

    def others(self):
        import os

        return os.environ["WORLD_SIZE"] != "1"

    def commit(self, final, document):
        draft = final.with_name(f".{final.name}")
        draft.unlink()
        shutil.move(final, draft)
        return super().commit(final, document)


class Overwrites(FilesCheckpointer):
    def save(self, request, shards, registry, document):
        import os

        if os.environ["RANK"] == "0":
            shutil.rmtree(self.directory / str(CheckpointId(request.step, document["attempt"])), ignore_errors=True)
        self.meet("cleared", registry.mesh.world, None)
        return super().save(request, shards, registry, document)


class Unchecked(FilesCheckpointer):
    def fill(self, shard, box, kept, directory):
        from gangline_testkit.toys import files

        class Blind:
            @staticmethod
            def crc32(content):
                return kept["checksum"]

        real, files.zlib = files.zlib, Blind
        try:
            super().fill(shard, box, kept, directory)
        finally:
            files.zlib = real


class Newest(FilesCheckpointer):
    def find_latest(self):
        return max(self.list(), default=None)


class ForgetsDocument(FilesCheckpointer):
    def read_document(self, id):
        return {**super().read_document(id), "states": {}}


class HidesFullDisk(FilesCheckpointer):
    def write_boxes(self, directory, rank, shards):
        super().write_boxes(directory, rank, shards)
        return ""


class KeepsDamageToItself(FilesCheckpointer):
    """Raises BadCheckpoint only on the rank that reads the damaged file."""

    def load(self, id, shards, registry):
        try:
            self.fill_all(id, shards)
        except FileNotFoundError as error:
            raise BadCheckpoint("an array", None, str(error.filename)) from error


class CountsUnreadable(FilesCheckpointer):
    """Reports no damage for any checkpoint, so an unreadable one counts as complete."""

    def explain_damage(self, id):
        return ""


class TrustsNames(FilesCheckpointer):
    def is_of(self, document, id):
        return True
