"""Measure time and memory of a start from a sharded Hugging Face directory, compared with a plain read of its bytes.

    python benchmarks/import_hf.py --gigabytes 2 --ranks 1 2 --dtype float32 bfloat16

The benchmark makes the directory from random numbers, and deletes it. Each of `--ranks` processes holds its share of
the rows of every weight in float32, like ZeRO shards, and fills it with `load_pretrained`. The plain read reads the
same share of the files into one buffer of 16 MB. The ways alternate; a cold round first drops the files from the page
cache. Prints medians: gigabytes of the files per second, the ratio to the plain read, and peak memory above the memory
before the weights were allocated, relative to the bytes of the weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

BUFFER = 16 << 20
WORDS = ("model=decoder", "model.dim=2048", "model.heads=16", "model.kv_heads=4", "model.ffn_dim=5632")
VOCABULARY = 32_000


def run_of(layers: int):
    from gangline.config.compose import compose_one

    return compose_one([*WORDS, f"model.vocab_size={VOCABULARY}", f"model.layers={layers}"])


def make(directory: Path, gigabytes: float, dtype: str) -> int:
    """Write random weights of about `gigabytes`; return the number of layers."""
    import torch

    from gangline.model.compose import compose_model
    from gangline.model.tree import get_parameter_shapes
    from gangline.shard import get_itemsize
    from gangline_models.families.decoder import make_config_json
    from gangline_models.hugging_face.write import export

    layers = 1
    while sum(torch.Size(s).numel() for s in shapes_of(layers + 1).values()) * get_itemsize(dtype) < gigabytes * 1e9:
        layers += 1
    run = run_of(layers)
    tree, plan = compose_model(run)
    shapes = get_parameter_shapes(tree)
    generator = torch.Generator().manual_seed(0)
    arrays = ((name, torch.empty(shape).uniform_(generator=generator)) for name, shape in shapes.items())
    export(
        directory,
        arrays,
        plan=plan,
        shapes=shapes,
        config=make_config_json(run.model, dtype=dtype),
        dtype=dtype,
        max_shard_bytes=1_000_000_000,
    )
    return layers


def shapes_of(layers: int) -> dict[str, tuple[int, ...]]:
    from gangline.model.compose import compose_model
    from gangline.model.tree import get_parameter_shapes

    return get_parameter_shapes(compose_model(run_of(layers))[0])


class Peak:
    """Peak memory of this process above the memory at the start, in bytes, with mapped files.

    The operating system counts it, so the measurement needs no other thread.
    """

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current memory
        self.before = self._now("VmRSS")

    @staticmethod
    def _now(field: str) -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields[field].split()[0]) << 10

    def beyond(self) -> int:
        return self._now("VmHWM") - self.before


def fill(directory: Path, layers: int, rank: int, ranks: int, start, found) -> None:
    """Measure `load_pretrained` on a rank: (seconds, bytes of weights, peak bytes above the memory at the start)."""
    import torch

    from gangline.model.compose import compose_model
    from gangline.model.tree import get_parameter_shapes
    from gangline.shard import Shard, name_model_array
    from gangline_models.hugging_face.read import load_pretrained

    torch.set_num_threads(1)
    tree, plan = compose_model(run_of(layers))
    peak = Peak()
    shards = []
    for name, shape in get_parameter_shapes(tree).items():
        first, last = (shape[0] * n // ranks for n in (rank, rank + 1))
        local = torch.zeros(last - first, *shape[1:]).fill_(0)  # fill_ allocates the pages before the clock starts
        shards.append(Shard(name_model_array(name), shape, local.dtype, (first, *(0 for _ in shape[1:])), local))
    start.wait()
    began = time.perf_counter()
    load_pretrained(directory, shards, plan)
    seconds = time.perf_counter() - began
    found.put((seconds, sum(shard.local.nbytes for shard in shards), peak.beyond()))


def raw(directory: Path, layers: int, rank: int, ranks: int, start, found) -> None:
    """Measure a plain read of this rank's share of every file."""
    buffer = bytearray(BUFFER)
    buffer[:] = bytes(BUFFER)
    view = memoryview(buffer)
    start.wait()
    began = time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        first, last = (size * n // ranks for n in (rank, rank + 1))
        with path.open("rb", buffering=0) as file:
            file.seek(first)
            while (left := last - file.tell()) > 0 and file.readinto(view[: min(left, BUFFER)]):
                pass
    found.put((time.perf_counter() - began, BUFFER, BUFFER))


def forget(directory: Path) -> None:
    """Drop the files from the page cache."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(way, directory: Path, layers: int, ranks: int) -> list[tuple[float, int, int]]:
    context = multiprocessing.get_context("spawn")
    start, found = context.Barrier(ranks), context.Queue()
    workers = [
        context.Process(target=way, args=(directory, layers, rank, ranks, start, found)) for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    results = [found.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    asked = parser.parse_args()
    for dtype in asked.dtype:
        with tempfile.TemporaryDirectory(prefix="import-") as folder:
            directory = Path(folder) / "model"
            layers = make(directory, asked.gigabytes, dtype)
            nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
            for ranks in asked.ranks:
                seconds: dict[str, list[float]] = {"raw": [], "filled": []}
                memory: list[float] = []
                for _ in range(asked.rounds):
                    for name in random.sample(list(seconds), len(seconds)):
                        if not asked.warm:
                            forget(directory)
                        results = timed({"raw": raw, "filled": fill}[name], directory, layers, ranks)
                        seconds[name].append(max(one[0] for one in results))
                        if name == "filled":
                            memory.append(max(one[2] / one[1] for one in results))
                taken = {name: statistics.median(values) for name, values in seconds.items()}
                print(
                    f"{nbytes / 1e9:.1f} GB {dtype} {ranks} ranks {'warm' if asked.warm else 'cold'}:  "
                    f"{nbytes / taken['filled'] / 1e9:.2f} GB/s, raw {nbytes / taken['raw'] / 1e9:.2f}, "
                    f"x {taken['raw'] / taken['filled']:.2f}  "
                    f"memory x {max(memory):.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
