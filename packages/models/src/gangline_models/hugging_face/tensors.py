"""Tensors of a Hugging Face directory, by Hugging Face name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from gangline.errors import UserError
from gangline.storage.files import read_regular
from gangline_models.hugging_face.tensor_file import TensorFile

if TYPE_CHECKING:
    import torch

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FETCH = "hf download OWNER/MODEL --local-dir DIR  downloads the missing files of a model of the Hugging Face hub."
POINTER = b"version https://git-lfs"  # first bytes of a file that Git LFS has not fetched
PULL = "Run git lfs pull in that directory."


class Tensors:
    """Thread-safe reader of a directory's tensors, a few rows at a time; files stay open inside the context."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).expanduser()
        self._open = ExitStack()
        self._files: dict[str, TensorFile] = {}
        self._index: dict[str, str] = {}  # tensor name -> file, from the index
        self._opening = Lock()

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._files.clear()

    @cached_property
    def files(self) -> dict[str, str]:
        """Tensor name -> name of the file that holds the tensor. Other files in the directory are ignored.

        Raises UserError if there are no weights or two sets, or if the index is damaged.
        """
        index, one = self.directory / INDEX, self.directory / ONE_FILE
        if index.exists():
            try:
                weight_map = dict(json.loads(read_regular(index))["weight_map"])
                if other := [name for name in weight_map.values() if not isinstance(name, str)]:
                    raise TypeError(f"{other[0]} is not a file name")
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(
                    f"{index} is damaged.", f"The weight_map of the index cannot be read ({error!r})."
                ) from error
            if outside := [name for name in weight_map.values() if name in ("", ".", "..") or set(name) & set("/\\\0")]:
                raise UserError(
                    f"{index} names a file outside its directory: {outside[0]!r}.",
                    "Weights must be in the directory of the index.",
                    "Use file names without a directory.",
                )
            if one.exists() and ONE_FILE not in weight_map.values():
                raise UserError(
                    f"{self.directory} has weights twice: in {ONE_FILE}, and in the files that {INDEX} names.",
                    "transformers would load the single file; gangline does not guess which weights are correct.",
                    "Remove one of the two sets.",
                )
            self._index = weight_map
            return weight_map
        if one.exists():
            return dict.fromkeys(self._open_file(ONE_FILE).list_names(), ONE_FILE)
        others = [path.name for kind in ("safetensors", "bin", "pth") for path in self.directory.glob(f"*.{kind}")]
        beside = f" {', '.join(sorted(others)[:3])} {'is' if len(others) == 1 else 'are'} not read." if others else ""
        raise UserError(f"{self.directory} has no weights.", f"{ONE_FILE} and {INDEX} are missing.{beside}", FETCH)

    def _open_file(self, name: str) -> TensorFile:
        with self._opening:
            if name not in self._files:
                path = self.directory / name
                try:
                    self._files[name] = TensorFile(path)
                    self._open.callback(self._files[name].close)
                except FileNotFoundError:
                    raise UserError(f"{path} is missing.", f"{INDEX} names this file.", FETCH) from None
                except OSError as error:
                    if _is_pointer(path):
                        raise UserError(
                            f"{path} is a Git LFS pointer instead of weights.",
                            "Git LFS has not downloaded the file.",
                            PULL,
                        ) from error
                    raise UserError(f"{path} cannot be read.", str(error), FETCH) from error
                self._refuse_copies(name)
            return self._files[name]

    def _refuse_copies(self, name: str) -> None:
        """Raise UserError for a tensor that the index assigns to another file: transformers may load it from either."""
        for tensor in self._files[name].list_names():
            if (other := self._index.get(tensor, name)) != name:
                raise UserError(
                    f"{self.directory} has the tensor {tensor} twice: in {other}, and in {name}.",
                    f"{INDEX} names the first file; transformers may load the second.",
                    "Remove the tensor from one of the files.",
                )

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor. Raises UserError if the tensor is missing."""
        if name not in self.files:
            raise UserError(f"the tensor {name} is missing in {self.directory}.")
        file = self._open_file(self.files[name])
        if name not in file.list_names():
            raise UserError(
                f"the tensor {name} is missing in {file.path}.", f"{INDEX} assigns the tensor to that file."
            )
        return file.get_shape(name)

    def get_dtype(self, name: str) -> str:
        """Return the torch name of a tensor's dtype. Raises UserError for an unsupported dtype."""
        return self._open_file(self.files[name]).get_dtype(name)

    def fill(self, name: str, box: tuple[slice, ...], local: torch.Tensor) -> bool:
        """Read the slice `box` of a tensor into `local`, as `TensorFile.fill`; return whether that was possible."""
        return self._open_file(self.files[name]).fill(name, box, local)

    def iterate_blocks(self, name: str, box: tuple[slice, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the slice `box` of a tensor, a few rows at a time, as `TensorFile.iterate_blocks`."""
        return self._open_file(self.files[name]).iterate_blocks(name, box)


def _is_pointer(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def list_tensor_names(directory: str | Path) -> set[str]:
    """Return the names of all tensors in the directory; set() without weights. Raises UserError for a damaged index."""
    place = Path(directory).expanduser()
    if not any((place / name).exists() for name in (ONE_FILE, INDEX)):
        return set()
    with Tensors(place) as tensors:
        return set(tensors.files)
