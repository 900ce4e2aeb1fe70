"""The tensors of a Hugging Face directory, by their names there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from gangline.errors import UserError
from gangline.interop.tensor_file import TensorFile

if TYPE_CHECKING:
    import torch

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Tensors:
    """Reads without holding more than was asked for, in any thread. A context manager: files stay open inside it."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).expanduser()
        self._open = ExitStack()
        self._files: dict[str, TensorFile] = {}
        self._opening = Lock()

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._files.clear()

    @cached_property
    def files(self) -> dict[str, str]:
        """Tensor name -> the file that has it. Raises UserError where there are no weights or the index is damaged."""
        index = self.directory / INDEX
        if index.exists():
            try:
                return dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{index} is damaged.", f"It has no readable weight_map ({error!r}).") from error
        if (self.directory / ONE_FILE).exists():
            return dict.fromkeys(self._file(ONE_FILE).names(), ONE_FILE)
        raise UserError(f"{self.directory} has no weights.", f"Neither {ONE_FILE} nor {INDEX} is in it.")

    def _file(self, name: str) -> TensorFile:
        with self._opening:
            if name not in self._files:
                from safetensors import SafetensorError

                path = self.directory / name
                try:
                    self._files[name] = TensorFile(path)
                    self._open.callback(self._files[name].close)
                except FileNotFoundError:
                    raise UserError(f"{path} is missing.", f"{INDEX} says that weights lie there.") from None
                except (OSError, SafetensorError) as error:
                    raise UserError(f"{path} cannot be read.", str(error)) from error
            return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape. Raises UserError where there is no such tensor."""
        if name not in self.files:
            raise UserError(f"{self.directory} has no tensor {name}.")
        file = self._file(self.files[name])
        if name not in file.names():
            raise UserError(f"{file.path} has no tensor {name}.", f"{INDEX} says that it lies there.")
        return file.shape(name)

    def fill(self, name: str, box: tuple[slice, ...], local: torch.Tensor) -> bool:
        """Straight into `local` where that can be, as `TensorFile.fill`."""
        return self._file(self.files[name]).fill(name, box, local)

    def blocks(self, name: str, box: tuple[slice, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """The part of a tensor that `box` takes of it, a few rows at a time, as `TensorFile.blocks`."""
        return self._file(self.files[name]).blocks(name, box)
