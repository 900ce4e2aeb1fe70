"""Functions of `torch.cuda` for the fake device: one GPU of the properties of an H100, streams without an order."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from gangline_testkit.fake_cuda.watch import note_wait

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=80 << 30,
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
    uuid="fake",
)
_numbers = itertools.count(1)
_current = threading.local()


class FakeEvent:
    """An event that has always happened."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        note_wait("event.synchronize")

    def query(self) -> bool:
        return True


class FakeStream:
    """A stream of the fake device, which has a number and no queue."""

    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None) -> None:
        self.cuda_stream = next(_numbers) if number is None else number
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: FakeStream) -> None: ...

    def wait_event(self, event: FakeEvent) -> None: ...

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()

    def synchronize(self) -> None:
        note_wait("stream.synchronize")

    def query(self) -> bool:
        return True


DEFAULT = FakeStream(number=0)


def install(library: ctypes.CDLL) -> None:
    """Replace the functions of `torch.cuda` that a CPU build lacks, for the rest of the process."""
    resize = torch.UntypedStorage.resize_

    @contextmanager
    def use_stream(stream: FakeStream | None) -> Iterator[None]:
        before = get_stream()
        _set_stream(library, before if stream is None else stream)
        try:
            yield
        finally:
            _set_stream(library, before)

    def resize_storage(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)
        library.fake_cuda_resize(ctypes.c_void_p(self._cdata), ctypes.c_size_t(size))
        return self

    def add_memory(memory: int, size: int, flags: int) -> int:
        library.fake_cuda_pin(ctypes.c_void_p(memory), ctypes.c_size_t(size))
        return 0

    def release_memory(memory: int) -> int:
        library.fake_cuda_unpin(ctypes.c_void_p(memory))
        return 0

    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": lambda device=None: PROPERTIES,
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: note_wait("cuda.synchronize"),
        "current_stream": get_stream,
        "default_stream": lambda device=None: DEFAULT,
        "stream": use_stream,
        "set_stream": lambda stream: _set_stream(library, stream),
        "Stream": FakeStream,
        "Event": FakeEvent,
        "check_error": lambda code: None,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=add_memory, cudaHostUnregister=release_memory),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "is_current_stream_capturing": lambda: False,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch.version.cuda = "12.9"
    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign, assignment]


def get_stream(device: Any = None) -> FakeStream:
    """Return the current stream of this thread."""
    return getattr(_current, "stream", DEFAULT)


def _set_stream(library: ctypes.CDLL, stream: FakeStream) -> None:
    _current.stream = stream
    library.fake_cuda_use_stream(ctypes.c_long(stream.cuda_stream))
