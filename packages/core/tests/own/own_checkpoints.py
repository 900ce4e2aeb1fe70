"""Checkpointer of `own_parts`: one .npz file per checkpoint, which a rename makes visible."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from gangline.checkpoint.base import Checkpointer, SaveHandle
from gangline.checkpoint.id import CheckpointId


class ArraysCheckpointer(Checkpointer):
    def __init__(self, run_dir):
        self._run_dir, self.folder = run_dir, Path(run_dir, "checkpoints")
        self.folder.mkdir(exist_ok=True)

    @property
    def run_dir(self):
        return self._run_dir

    def _file(self, id):
        return self.folder / f"{id}.npz"

    def save(self, request, shards, registry, document):
        id = CheckpointId(request.step, document["attempt"])
        arrays = {shard.name: shard.local.detach().cpu().numpy() for shard in shards}
        partial = self.folder / "partial.npz"
        with partial.open("wb") as file:
            np.savez(file, document=np.array(json.dumps(document)), **arrays)
        partial.rename(self._file(id))
        return SaveHandle(id).finish()

    def list(self):
        found = (CheckpointId.parse(path.stem) for path in self.folder.glob("step-*.npz"))
        return sorted(id for id in found if id is not None)

    def read_document(self, id):
        with np.load(self._file(id)) as file:
            return json.loads(str(file["document"]))

    def read_shapes(self, id):
        with np.load(self._file(id)) as file:
            return {name: file[name].shape for name in file.files if name != "document"}

    def load(self, id, shards, registry):
        with np.load(self._file(id)) as file:
            for shard in shards:
                shard.local.copy_(torch.from_numpy(file[shard.name])[shard.box.slices])


def build(config, run, store):
    return ArraysCheckpointer(run.job.dir)
