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
    "memory.bandwidth": ("bytes a second that its memory moves, by the datasheet", True),
    "peak.fp64": ("operations a second of dense products, by the datasheet", False),
    "peak.fp32": ("the same", False),
    "peak.fp16": ("the same", False),
    "peak.bf16": ("the same", True),
    "peak.fp8": ("the same", False),
    "peak.fp4": ("the same", False),
    "matmul.efficiency": ("share of the peak that large products in 16 bits reach", True),
    "matmul.efficiency_fp8": ("the same in 8 bits, scaling and casts included", False),
    "matmul.efficiency_fp4": ("the same in 4 bits", False),
    "matmul.half": ("operations of a product that takes twice as long as its rate says: ramps and tails", True),
    "attention.efficiency": ("share of the 16-bit peak that fused attention reaches forward", True),
    "attention.efficiency_backward": ("the same backward, in operations of two forward passes and a half", True),
    "attention.half": ("keys at which fused attention reaches half of these rates: starts, tiles half hidden", True),
    "attention.width": (
        "width of a head whose products take as many cycles as its exponentials do; these are free where not said",
        False,
    ),
    "attention.vendor": ("how much faster the maker's own fused attention is than torch's; 1 where not said", False),
    "memory.efficiency": ("share of the memory's bandwidth that elementwise kernels reach", True),
    "elementwise.passes": ("how often a forward pass moves each byte that it keeps; a backward pass twice that", True),
    "elementwise.passes_apart": ("the same where each operator is a kernel of its own", True),
    "module.seconds": (
        "time in which the host launches a module's forward pass, the least it takes; backward twice",
        True,
    ),
    "link.node.bandwidth": ("bytes a second that a rank sends inside its node", True),
    "link.node.latency": ("seconds of one message there", True),
    "link.cluster.bandwidth": ("bytes a second that a rank sends to another node", True),
    "link.cluster.latency": ("seconds of one message there", True),
    "link.node.efficiency": ("share of that bandwidth that collectives reach inside a node", True),
    "link.cluster.efficiency": ("the same between nodes", True),
    "link.cluster.crowding": (
        "share by which collectives between nodes take longer with each doubling of these; none where not said",
        False,
    ),
    "link.rack.bandwidth": (
        "bytes a second that a rank sends to another node of its rack, where that is not link.cluster.bandwidth",
        False,
    ),
    "link.rack.latency": ("seconds of one message there", False),
    "link.rack.efficiency": ("share of that bandwidth that collectives reach inside a rack", False),
    "link.fibre.bandwidth": ("bytes a second that a rank sends to another datacentre, all ranks sending", False),
    "link.fibre.latency": ("seconds of one message there", False),
    "link.fibre.efficiency": ("share of that bandwidth that collectives reach between datacentres", False),
    "overlap.share": ("share of a transfer that need not be waited for which computation hides", True),
    "jitter.sigma": ("a rank's step time, relative spread; the slowest of n ranks sets the step", True),
    "jitter.seconds": ("the same in seconds of a step, however long it is; none where not said", False),
    "host.seconds": ("time of a step outside its passes: data, loss, logging, optimizer launches", True),
    "node.alone": ("how much faster a rank computes while all others of its node wait: it has their cores, too", False),
    "storage.bandwidth": ("bytes a second that a rank writes to a checkpoint while the step waits", False),
    "storage.read": ("bytes a second that a rank reads of its data", False),
    "watts": ("of one accelerator under load", False),
    "watts.rest": ("of its share of the node, network and cooling", False),
    "price.hour": ("US dollars of one accelerator and hour", False),
    "price.kwh": ("US dollars of a kilowatt-hour", False),
    "failure.hours": ("mean accelerator-hours between failures that stop a run", False),
    "restart.seconds": ("from a failure to the first new step, work lost not counted", False),
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
                f"cluster={self.name} does not say {name}.",
                f"It is: {what}. Nothing is invented for it.",
                f"Add it to the file, with its source:  {name}: {{value: ..., source: ...}}",
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
            f"Shipped: {', '.join(list_shipped())}; or the path of a file that ends in .yaml.",
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
        raise UserError(f"cannot read {path}.", str(error).splitlines()[0]) from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        version = content.get("version") if isinstance(content, dict) else None
        raise UserError(
            f"{path} is a cluster file of version {version}.",
            f"This gangline reads version {VERSION}.",
            "Write it anew, for example from a shipped one.",
        )
    network = content.get("network") or {}
    if not isinstance(network, dict):
        raise UserError(f"{path}: network is no mapping.", "It is, such as:  network: {gpus_per_node: 8}")
    _check_names(content, PLACES, "", path)
    _check_names(network, NETWORK, "network.", path)
    numbers = _read_numbers(content, path)
    return Cluster(path.stem, str(content.get("about", "")), _read_topology(content, path), numbers)


def _check_names(given: dict[str, Any], names: Sequence[str], place: str, path: Path) -> None:
    """Raise UserError for an unknown name."""
    for name in given:
        if name not in names:
            choices = ", ".join(f"{place}{choice}" for choice in names)
            raise UserError(
                f"{path} says {place}{name}, which no cluster file has.",
                suggest_near(str(name), names),
                f"It may say: {choices}.",
            )


def _read_numbers(found: dict[str, Any], path: Path) -> dict[str, Quantity]:
    entries = found.get("numbers")
    if not isinstance(entries, dict):
        raise UserError(f"{path} has no `numbers`.", "They are what a cluster file is for.")
    read = {}
    for name, entry in entries.items():
        if name not in NUMBERS:
            raise UserError(f"{path} says {name}, which is no number of a cluster.", suggest_near(str(name), NUMBERS))
        try:
            if isinstance(entry["value"], bool):
                raise TypeError
            value, source = float(entry["value"]), str(entry["source"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: {name} needs a number and its source.", f"{name}: {{value: ..., source: ...}}"
            ) from error
        if not isfinite(value) or not source:
            raise UserError(f"{path}: {name}={entry['value']} is no finite number with a source.")
        if wrong := explain_range(str(name), value):
            raise UserError(f"{path}: {name}={entry['value']} must be {wrong}.", f"It is: {NUMBERS[name][0]}.")
        read[str(name)] = Quantity(value, source)
    tiers = [tier for tier in ("rack", "fibre") if any(name.startswith(f"link.{tier}.") for name in read)]
    if (found.get("network") or {}).get("nodes_per_datacentre") is not None:
        tiers.append("fibre")
    whole = {f"link.{tier}.{what}" for tier in tiers for what in ("bandwidth", "latency", "efficiency")}
    missing = [name for name, (_, needed) in NUMBERS.items() if (needed or name in whole) and name not in read]
    if missing:
        raise UserError(f"{path} does not say {', '.join(missing)}.", "A step's time is made of them.")
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
        raise UserError(f"{path}: network.{name}={value} must be a whole number, at least 1.")
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
        raise UserError(f"{path} does not say what its network is.", f"It lacks or misstates {error}.") from error
