"""A private Slurm cluster on this machine: one controller, one slurmd per node, from Debian's packages.

All files are in one directory, and the daemons listen on separate ports. Another Slurm of the machine is not affected.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from gangline_testkit.ports import free_port

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
ABSENT = (
    "These tests run a real Slurm, and this machine has no {missing}. As root, on Debian or Ubuntu:  "
    "apt-get install munge slurmctld slurmd slurm-client    or let  nox -s slurm  do so."
)
SETTINGS = """\
ClusterName=gangline
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
SlurmdParameters=config_overrides
SlurmdTimeout={timeout}
KillWait=60
MpiDefault=none
ReturnToService=2
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
TopologyPlugin=topology/tree
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=2 Feature=cpu
PartitionName=main Nodes=n[1-{nodes}] Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-{nodes}] PriorityTier=9 PreemptMode=OFF
PartitionName=narrow Nodes=n[1-{nodes}] MaxNodes=1
"""
TOPOLOGY = """\
SwitchName=rack0 Nodes=n[1-2]
SwitchName=rack1 Nodes=n[3-{nodes}]
SwitchName=spine Switches=rack[0-1]
"""


def missing() -> list[str]:
    """Return the commands of Slurm that are not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [name for name in COMMANDS if shutil.which(name, path=path) is None]


class OwnCluster:
    """Slurm cluster of `nodes` nodes n1, n2, ... on this machine."""

    def __init__(self, folder: Path, nodes: int, timeout: int = 10) -> None:
        if absent := missing():
            raise RuntimeError(ABSENT.format(missing=", ".join(absent)))
        self.folder, self.nodes, self.timeout = folder, nodes, timeout
        self.environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]),
        }

    # --- daemons -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir()
        (self.folder / "munge").chmod(0o700)
        first = free_port()
        ports = [free_port() for _ in range(self.nodes)]
        text = SETTINGS.format(
            host=socket.gethostname().split(".")[0],
            user=getpass.getuser(),
            folder=self.folder,
            port=first,
            ports=f"[{','.join(map(str, sorted(ports)))}]",
            nodes=self.nodes,
            timeout=self.timeout,
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "topology.conf").write_text(TOPOLOGY.format(nodes=self.nodes))
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        own = [f"--{name}={self.folder}/munge/{name.removesuffix('-file')}" for name in ("socket", "pid-file")]
        own += [f"--{name}={self.folder}/munge/{name.removesuffix('-file')}" for name in ("log-file", "seed-file")]
        self.ask("munged", "--force", f"--key-file={key}", *own)
        self.ask("slurmctld")
        for name in self.names():
            self.start_node(name)
        self.wait_idle(self.names())

    def names(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node, also after the node was lost."""
        self.ask("slurmd", "-N", name)

    def fix(self) -> None:
        """Cancel all jobs, start killed daemons, and wait until every node is idle."""
        self.ask("scancel", "--user", getpass.getuser())
        for name in self.names():
            pid = self._pid(f"slurmd-{name}.pid")
            if pid is None or not Path(f"/proc/{pid}").exists():
                self.start_node(name)
            if any(word in self.ask("scontrol", "-o", "show", "node", name) for word in ("DOWN", "DRAIN")):
                with contextlib.suppress(AssertionError):  # the node may have recovered by itself
                    self.ask("scontrol", "update", f"NodeName={name}", "State=RESUME")
        self.wait_idle(self.names())

    def stop(self) -> None:
        """Kill every daemon and the processes that it started."""
        for name in self.names():
            self.kill(self.processes(name))
        pids = [self._pid(name) for name in ("slurmctld.pid", *(f"slurmd-{name}.pid" for name in self.names()))]
        self.kill([pid for pid in (*pids, self._pid("munge/pid")) if pid is not None])

    def kill_node(self, name: str) -> None:
        """Kill slurmd, its steps, the agent and its ranks by SIGKILL, like a power failure of the node."""
        pid = self._pid(f"slurmd-{name}.pid")
        self.kill([*([pid] if pid else []), *self.processes(name)])

    def processes(self, name: str) -> list[int]:
        """Return the processes with the node's name in the environment that Slurm sets, and their step daemons."""
        wanted, ours = f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.folder}".encode()
        found: set[int] = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes()
                if wanted in variables.split(b"\0") and ours in variables:
                    found.add(int(entry.name))
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    if "slurmstepd" in Path(f"/proc/{parent}/cmdline").read_text():
                        found.add(parent)
        return sorted(found)

    @staticmethod
    def kill(pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pid(self, file: str) -> int | None:
        path = self.folder / file
        return int(path.read_text()) if path.exists() and path.read_text().strip() else None

    # --- commands ----------------------------------------------------------------------------------------------------

    def ask(self, *command: str) -> str:
        """Run a command and return its output. Raises AssertionError with the output if the command fails."""
        done = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def queue(self) -> list[str]:
        """Return id and state of every job, such as "17 PENDING"."""
        return self.ask("squeue", "--noheader", "--format=%i %T").splitlines()

    def wait_idle(self, names: Iterable[str], seconds: float = 300.0) -> None:
        """Wait until the nodes are idle and no job process runs on them."""
        deadline = time.monotonic() + seconds
        wanted = sorted(names)
        while True:
            idle = self.ask("sinfo", "--noheader", "--Node", "--partition=main", "--states=idle", "--format=%N %T")
            free = sorted(line.split()[0] for line in idle.splitlines() if line.endswith("idle"))
            if set(wanted) <= set(free) and not any(self.processes(name) for name in wanted):
                return
            assert time.monotonic() < deadline, f"idle: {free}, wanted: {wanted}\n{self.ask('sinfo', '-N', '-l')}"
            time.sleep(0.2)
