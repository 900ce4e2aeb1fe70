"""Options of `launch=slurm`. Torch-free."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from gangline import Problem, UserError
from gangline.config import PositiveInt, RunsCode
from gangline_launch.config import ClusterLaunch
from gangline_launch.slurm import commands
from gangline_launch.slurm.commands import STATE

if TYPE_CHECKING:
    from gangline.config import Run

# Option of sbatch that the batch script sets -> option of gangline that controls it.
OWN = {
    **{name: f"launch.{name}" for name in ("partition", "account", "qos", "time", "constraint", "nodes", "switches")},
    **{"segment": "launch.segment", "gpus-per-node": "launch.gpus_per_node", "exclusive": "launch.exclusive"},
    **{"signal": "launch.signal_seconds", "array": "train -m", "job-name": "run.name"},
    **dict.fromkeys(("ntasks", "ntasks-per-node"), "launch.processes"),
    **dict.fromkeys(
        ("output", "error", "open-mode", "comment", "requeue", "no-requeue", "no-kill", "wait", "wrap"),
        "the launcher itself",
    ),
}
# Options of sbatch that only choose resources and priority. Other options can run code: --export can set BASH_ENV.
PLACE = ("reservation", "gres", "mem", "mem-per-gpu", "cpus-per-task", "cpus-per-gpu", "nodelist", "exclude", "nice")
NOT_IN_A_LINE = re.compile("[\\\\\x00-\x1f\x7f\x85\u2028\u2029]")
TIME = re.compile(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2}")


def _is_placement(value: Any) -> bool:
    words = value if isinstance(value, list) else [value]
    return all(isinstance(word, str) and word.partition("=")[0].removeprefix("--") in PLACE for word in words)


@dataclass
class SlurmLaunch(ClusterLaunch):
    """Options of `launch=slurm`: a batch job of Slurm."""

    at_once: ClassVar[bool] = True

    partition: str | None = None  # Slurm partition; null: the site's default
    account: str | None = None  # Slurm account that is charged; null: your default account
    qos: str | None = None  # Slurm quality of service (QOS); null: the account's default
    time: str | None = None  # job time limit: '2:30:00' (quoted in YAML) or 1-12:00:00; null: partition's default
    constraint: str | None = None  # required node features (sbatch --constraint): 'h100&ib'; null: any node
    exclusive: bool = True  # exclusive use of nodes (sbatch --exclusive)
    container: Literal["pyxis", "apptainer"] = "pyxis"  # container runtime for launch.image
    mounts: Annotated[list[str], RunsCode()] = field(
        default_factory=list
    )  # container mounts in addition to the run directory: /data or /from:/to
    switches: PositiveInt | None = None  # maximum number of leaf switches per job (topology/tree); null: no limit
    switches_wait: str | None = None  # maximum wait for launch.switches, as '0:30:00'; null: site's maximum
    segment: PositiveInt | None = None  # nodes per segment in one block (topology/block, Slurm >= 23.11); null: none
    drain: bool = False  # drain bad nodes in Slurm (scontrol); requires operator rights
    options: Annotated[list[str], RunsCode(data=_is_placement)] = field(
        default_factory=list
    )  # additional options of sbatch that the site needs: --reservation=night
    most_running: PositiveInt | None = None  # maximum number of concurrent runs of a sweep; null: no limit

    def count_gpus_per_node(self, run: Run) -> int:
        if run.job.device is not None and run.job.device.split(":")[0] == "cpu":
            return 0
        return (commands.find_gpus_per_node(self.partition) or 0) if self.gpus_per_node is None else self.gpus_per_node

    def refuse_unknown_gpus(self, run: Run) -> None:
        """Raise UserError if launch.gpus_per_node is null and Slurm did not report the number of GPUs per node."""
        asks = self.gpus_per_node is None and (run.job.device or "").split(":")[0] != "cpu"
        if (
            asks and commands.find_gpus_per_node(self.partition) is None and shutil.which("sinfo")
        ):  # without sinfo, sbatch is missing too and is reported instead
            raise UserError(
                "launch.gpus_per_node is null, and sinfo did not report the number of GPUs per node.",
                "Without this number, the job would request no GPUs.",
                "Set the number:  launch.gpus_per_node=8   (0: nodes without GPUs), or try again.",
            )

    def make_exclude_option(self, names: Iterable[str]) -> list[str]:
        """Return --exclude for sbatch: `names`, and the excluded nodes of `options`, whose --exclude it replaces."""
        own = [word.partition("=")[2] for word in self.options if word.startswith("--exclude=")]
        left_out = sorted(names)
        return [f"--exclude={','.join([*own, *left_out])}"] if left_out else []

    def check(self, run: Run) -> list[Problem]:
        """Return problems of `ClusterLaunch.check`, and of values that Slurm would refuse or misread."""
        problems = super().check(run)
        problems += self._check_text(run)
        limit = parse_slurm_time(self.time)
        if limit is not None and self.signal_seconds is not None and limit <= self.signal_seconds:
            what = f"launch.time={self.time} must be longer than launch.signal_seconds={self.signal_seconds:g}."
            why = "Slurm signals the job launch.signal_seconds before its end, so each start would stop at once."
            problems.append(Problem(what, why, "Increase launch.time, or decrease launch.signal_seconds."))
        for name, value in (("time", self.time), ("switches_wait", self.switches_wait)):
            if value is None or TIME.fullmatch(value):
                continue
            why = "YAML reads an unquoted 2:30:00 as the number 9000, so a plain number is refused."
            fix = f"Use hours:minutes:seconds or days-hours, quoted in YAML files:  launch.{name}='2:30:00'"
            problems.append(Problem(f"launch.{name}={value} is not a Slurm time.", why if value.isdigit() else "", fix))
        if self.segment is not None and (self.count_max_nodes() % self.segment or self.spares % self.segment):
            spares = f" and launch.spares={self.spares}" if self.spares else ""
            what = f"launch.segment={self.segment} does not divide launch.nodes={self.nodes}{spares}."
            problems.append(
                Problem(
                    what, "A job consists of complete segments.", "Make nodes and spares multiples of launch.segment."
                )
            )
        if self.switches_wait is not None and self.switches is None:
            problems.append(
                Problem("launch.switches_wait has no effect without launch.switches.", "", "launch.switches=1")
            )
        problems += [
            Problem(
                f"launch.options contains {word!r}, which does not have the form --name or --name=value.",
                "",
                "For example:  launch.options=['--reservation=night']",
            )
            for word in self.options
            if not re.fullmatch(r"--[a-z][a-z0-9-]*(=\S.*)?", word)
        ]
        for word in self.options:
            name = word.partition("=")[0].removeprefix("--")
            if name in OWN:
                what = f"launch.options contains {word!r}, but the batch script already sets --{name}."
                problems.append(
                    Problem(what, "sbatch uses only one value of an option.", f"--{name} is set by {OWN[name]}.")
                )
        return problems

    def _check_text(self, run: Run) -> list[Problem]:
        """Return problems of text in options: line breaks, backslashes (which sbatch removes), and % in a path."""
        problems = []
        if "%" in (run.job.dir or ""):
            why = "Slurm replaces patterns such as %j in the names of the nodes' output files."
            problems.append(Problem(f"run.dir={run.job.dir} contains a %.", why, "Choose a directory without %."))
        texts = {f"launch.{each.name}": getattr(self, each.name) for each in fields(self) if each.name != "setup"}
        texts |= {"run.dir": run.job.dir, "run.name": run.job.name}
        for name, value in texts.items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and (odd := NOT_IN_A_LINE.search(text)):
                    what = f"{name}={text!r} contains {odd[0]!r}."
                    why = "A line of the script holds one option, and sbatch removes backslashes."
                    problems.append(Problem(what, why, f"Remove {odd[0]!r}."))
        if key := STATE.search(run.job.name):
            what = f"run.name={run.job.name} contains {key[0].strip()!r}."
            problems.append(
                Problem(what, "scontrol prints the state of a job under this key.", "Choose a name without this key.")
            )
        return problems


def parse_slurm_time(time: str | None) -> int | None:
    """Return a Slurm time in seconds; None if it has no form [hours:]minutes:seconds or days-hours[:min[:sec]]."""
    if time is None or not TIME.fullmatch(time):
        return None
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    parts = [*parts, 0, 0][:3] if dash else [0, 0, *parts][-3:]
    hours, minutes, seconds = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
