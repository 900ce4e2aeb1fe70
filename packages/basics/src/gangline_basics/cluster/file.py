"""Cluster file: compute, bandwidth, power, cost and failures of a machine, each number with its source. Torch-free.

YAML of this version, read from `cluster=NAME` (shipped here) or `cluster=FILE`:

    version: 1
    about: 8 H100 SXM5 a node
    network: {gpus_per_node: 8, nodes_per_rack: 4, nodes_per_datacentre: 512}
    numbers:
      peak.bf16: {value: 989.4e12, source: "NVIDIA H100 datasheet, SXM5, dense"}

`NUMBERS` lists every name with its unit and whether a file must have it. A missing number has no default: without a
price, no cost is reported. Links inside a rack default to `link.cluster`. A file with `nodes_per_datacentre` must
describe the fibre between datacentres (`link.fibre`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from gangline.config.suggest import suggest_near
from gangline.errors import UserError
from gangline.explain.topology import Topology
from gangline.storage.files import write_whole

VERSION = 1
PLACES = ("version", "about", "network", "numbers")
NETWORK = ("gpus_per_node", "nodes_per_rack", "nodes_per_datacentre")
SHIPPED = Path(__file__).parent / "shipped"

# names of numbers that may be 0; all others must be positive
MAY_BE_ZERO = {"overlap.share", "jitter.sigma", "host.seconds", "module.seconds", "matmul.half", "attention.half"}
MAY_BE_ZERO |= {"link.rack.latency", "link.fibre.latency"}
MAY_BE_ZERO |= {"link.node.latency", "link.cluster.latency", "elementwise.passes", "elementwise.passes_apart"}
MAY_BE_ZERO |= {
    "jitter.seconds",
    "link.cluster.crowding",
    "storage.bandwidth",
    "storage.read",
    "watts",
    "watts.rest",
    "price.hour",
    "price.kwh",
    "restart.seconds",
}

# name -> (description with unit, whether every file must have it)
NUMBERS: dict[str, tuple[str, bool]] = {
    "memory.bytes": ("memory of one accelerator, bytes", True),
    "memory.bandwidth": ("memory bandwidth of one accelerator by the datasheet, bytes/s", True),
    "peak.fp64": ("peak of dense float64 matmuls by the datasheet, FLOP/s", False),
    "peak.fp32": ("peak of dense float32 matmuls by the datasheet, FLOP/s", False),
    "peak.fp16": ("peak of dense float16 matmuls by the datasheet, FLOP/s", False),
    "peak.bf16": ("peak of dense bfloat16 matmuls by the datasheet, FLOP/s", True),
    "peak.fp8": ("peak of dense 8-bit floating-point matmuls by the datasheet, FLOP/s", False),
    "peak.fp4": ("peak of dense 4-bit floating-point matmuls by the datasheet, FLOP/s", False),
    "matmul.efficiency": ("share of the peak that large 16-bit matmuls reach", True),
    "matmul.efficiency_fp8": ("share of the peak that large 8-bit matmuls reach, including scaling and casts", False),
    "matmul.efficiency_fp4": ("share of the peak that large 4-bit matmuls reach", False),
    "matmul.half": ("FLOPs of a matmul that reaches half of matmul.efficiency, because of ramp-up and tail", True),
    "attention.efficiency": ("share of the 16-bit peak that fused attention reaches in the forward pass", True),
    "attention.efficiency_backward": (
        "share of the 16-bit peak of fused attention in the backward pass, at 2.5 times the forward FLOPs",
        True,
    ),
    "attention.half": ("number of keys at which fused attention reaches half of attention.efficiency", True),
    "attention.width": (
        "head width at which matmuls and exponentials of attention take equal time; if missing, exponentials are free",
        False,
    ),
    "attention.vendor": ("speed of the vendor's fused attention relative to torch's; default 1", False),
    "memory.efficiency": ("share of the memory's bandwidth that elementwise kernels reach", True),
    "elementwise.passes": (
        "memory accesses of a forward pass per saved activation byte; the backward pass has twice as many",
        True,
    ),
    "elementwise.passes_apart": ("elementwise.passes if each operator is a separate kernel (eager mode)", True),
    "module.seconds": (
        "minimum seconds in which the host launches the forward pass of a module; backward takes twice as long",
        True,
    ),
    "link.node.bandwidth": ("bandwidth of a rank inside its node, bytes/s", True),
    "link.node.latency": ("latency of a message inside a node, in seconds", True),
    "link.cluster.bandwidth": ("bandwidth of a rank to another node, bytes/s", True),
    "link.cluster.latency": ("latency of a message between nodes, in seconds", True),
    "link.node.efficiency": ("share of link.node.bandwidth that collectives inside a node reach", True),
    "link.cluster.efficiency": ("share of link.cluster.bandwidth that collectives between nodes reach", True),
    "link.cluster.crowding": (
        "relative slowdown of collectives between nodes with each doubling of the number of nodes; default 0",
        False,
    ),
    "link.rack.bandwidth": (
        "bandwidth of a rank to another node of its rack, bytes/s; default link.cluster.bandwidth",
        False,
    ),
    "link.rack.latency": ("latency of a message inside a rack, in seconds", False),
    "link.rack.efficiency": ("share of link.rack.bandwidth that collectives inside a rack reach", False),
    "link.fibre.bandwidth": ("bandwidth of a rank to another datacentre while all ranks send, bytes/s", False),
    "link.fibre.latency": ("latency of a message between datacentres, in seconds", False),
    "link.fibre.efficiency": ("share of link.fibre.bandwidth that collectives between datacentres reach", False),
    "overlap.share": ("share of an asynchronous transfer that overlaps with computation", True),
    "jitter.sigma": (
        "relative standard deviation of the step time of a rank; the slowest rank determines the step time",
        True,
    ),
    "jitter.seconds": (
        "jitter of the step time of a rank that does not grow with the step time, in seconds; default 0",
        False,
    ),
    "host.seconds": (
        "time of a step outside forward and backward passes (data, loss, logging, optimizer launches), in seconds",
        True,
    ),
    "node.alone": (
        "speed-up of a rank that computes while all other ranks of its node wait, because it can use their cores",
        False,
    ),
    "storage.bandwidth": ("bandwidth at which a rank writes a checkpoint while the step waits, bytes/s", False),
    "storage.read": ("bandwidth at which a rank reads its data, bytes/s", False),
    "watts": ("power of one accelerator under load, in watts", False),
    "watts.rest": ("power of node, network and cooling per accelerator, in watts", False),
    "price.hour": ("price of one accelerator-hour, in US dollars", False),
    "price.kwh": ("price of a kilowatt-hour, in US dollars", False),
    "failure.hours": ("mean accelerator-hours between failures that stop a run", False),
    "restart.seconds": ("time from a failure to the first new step, without lost work, in seconds", False),
}


@dataclass(frozen=True)
class Quantity:
    """A number of a cluster file and the source of the number."""

    value: float
    source: str


@dataclass(frozen=True)
class Cluster:
    """A cluster: `cluster["peak.bf16"]` returns a number, `cluster.get` a number or None."""

    name: str
    about: str
    topology: Topology
    numbers: Mapping[str, Quantity]

    def __getitem__(self, name: str) -> float:
        """Return a number of the cluster. Raises UserError if the file has no such number."""
        if name not in self.numbers:
            what, _ = NUMBERS[name]
            raise UserError(
                f"cluster={self.name}: the number {name} is missing.",
                f"Meaning: {what}. gangline invents no numbers.",
                f"Add the number to the cluster file, with its source:  {name}: {{value: ..., source: ...}}",
            )
        return self.numbers[name].value

    def get(self, name: str) -> float | None:
        quantity = self.numbers.get(name)
        return None if quantity is None else quantity.value

    def replace_numbers(self, numbers: Mapping[str, Quantity]) -> Cluster:
        """Return a copy in which the given numbers replace the cluster's own."""
        return replace(self, numbers={**self.numbers, **numbers})


def list_shipped() -> list[str]:
    """Return the names of the shipped cluster files, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_cluster(name: str) -> Cluster:
    """Return a shipped cluster by its name, or a cluster file by its path (.yaml). Raises UserError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else SHIPPED / f"{name}.yaml"
    if not path.is_file():
        raise UserError(
            f"cluster={name} does not exist.",
            suggest_near(name, list_shipped()),
            f"Shipped clusters: {', '.join(list_shipped())}. For a cluster file of your own:  cluster=FILE.yaml",
        )
    return _read(path)


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster as a file that `load_cluster` reads, atomically."""
    import yaml

    content = {
        "version": VERSION,
        "about": cluster.about,
        "network": {name: size for name in NETWORK if (size := getattr(cluster.topology, name)) is not None},
        "numbers": {name: asdict(quantity) for name, quantity in cluster.numbers.items()},
    }
    write_whole(path, yaml.safe_dump(content, sort_keys=False, width=120), durable=False)
    _read.cache_clear()


@cache
def _read(path: Path) -> Cluster:
    import yaml

    from gangline.config.yaml_files import load_yaml

    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"the cluster file {path} cannot be read.", str(error).splitlines()[0]) from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        version = content.get("version") if isinstance(content, dict) else None
        raise UserError(
            f"{path} is a cluster file of version {version}.",
            f"This version of gangline reads cluster files of version {VERSION}.",
            "Rewrite the file, for example from a copy of a shipped cluster file.",
        )
    network = content.get("network") or {}
    if not isinstance(network, dict):
        raise UserError(f"{path}: network must be a mapping.", "Example:  network: {gpus_per_node: 8}")
    _check_names(content, PLACES, "", path)
    _check_names(network, NETWORK, "network.", path)
    numbers = _read_numbers(content, path)
    return Cluster(path.stem, str(content.get("about", "")), _read_topology(content, path), numbers)


def _check_names(given: dict[str, Any], names: Sequence[str], place: str, path: Path) -> None:
    """Raise UserError for a key of `given` that is not in `names`."""
    for name in given:
        if name not in names:
            choices = ", ".join(f"{place}{choice}" for choice in names)
            raise UserError(
                f"{path}: unknown key {place}{name}.",
                suggest_near(str(name), names),
                f"Keys: {choices}.",
            )


def _read_numbers(found: dict[str, Any], path: Path) -> dict[str, Quantity]:
    entries = found.get("numbers")
    if not isinstance(entries, dict):
        raise UserError(f"{path}: numbers must be a mapping.", "Example:  numbers: {NAME: {value: ..., source: ...}}")
    read = {}
    for name, entry in entries.items():
        if name not in NUMBERS:
            raise UserError(f"{path}: unknown number {name}.", suggest_near(str(name), NUMBERS))
        try:
            if isinstance(entry["value"], bool):
                raise TypeError
            value, source = float(entry["value"]), str(entry["source"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: {name} must have a value, which is a number, and a source.",
                f"Write  {name}: {{value: ..., source: ...}}",
            ) from error
        if not isfinite(value) or not source:
            raise UserError(f"{path}: {name}={entry['value']} must be finite and have a source.")
        if wrong := explain_range(str(name), value):
            raise UserError(f"{path}: {name}={entry['value']} must be {wrong}.", f"Meaning: {NUMBERS[name][0]}.")
        read[str(name)] = Quantity(value, source)
    tiers = [tier for tier in ("rack", "fibre") if any(name.startswith(f"link.{tier}.") for name in read)]
    if (found.get("network") or {}).get("nodes_per_datacentre") is not None:
        tiers.append("fibre")
    whole = {f"link.{tier}.{what}" for tier in tiers for what in ("bandwidth", "latency", "efficiency")}
    missing = [name for name, (_, needed) in NUMBERS.items() if (needed or name in whole) and name not in read]
    if missing:
        raise UserError(
            f"{path}: missing numbers: {', '.join(missing)}.", "The step time is computed from all of these numbers."
        )
    return read


def explain_range(name: str, value: float) -> str:
    """Return the range that a number must be in, or "" if it is in range."""
    if name == "overlap.share" and not 0 <= value <= 1:
        return "between 0 and 1"
    if name == "node.alone" and value < 1:
        return "at least 1"
    if value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        return "at least 0" if name in MAY_BE_ZERO else "more than 0"
    return ""


def _count(network: dict[str, Any], name: str, default: int | None, path: Path) -> int:
    value = network[name] if default is None else network.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{path}: network.{name}={value} must be an integer of at least 1.")
    return value


def _read_topology(content: dict[str, Any], path: Path) -> Topology:
    network, numbers = content.get("network") or {}, content.get("numbers") or {}
    try:
        bandwidths = {
            tier: float(numbers[name]["value"]) / 1e9
            for tier in ("node", "rack", "cluster", "fibre")
            if (name := f"link.{tier}.bandwidth") in numbers or tier in ("node", "cluster")
        }
        several = "fibre" in bandwidths or network.get("nodes_per_datacentre") is not None
        return Topology(
            gpus_per_node=_count(network, "gpus_per_node", None, path),
            nodes_per_rack=_count(network, "nodes_per_rack", 1, path),
            nodes_per_datacentre=_count(network, "nodes_per_datacentre", None, path) if several else None,
            node_bandwidth=bandwidths["node"],
            rack_bandwidth=bandwidths.get("rack", bandwidths["cluster"]),
            cluster_bandwidth=bandwidths["cluster"],
            **({"fibre_bandwidth": bandwidths["fibre"]} if several else {}),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: the description of the network is incomplete.", f"Missing or invalid: {error}."
        ) from error
