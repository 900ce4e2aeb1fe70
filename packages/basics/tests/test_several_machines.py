"""`launch=elastic` on two machines, imitated by network namespaces; choice of the network interface."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from typing import ClassVar

import pytest

from gangline_basics.launch import elastic
from gangline_basics.launch.elastic import AgentNode, RankFiles
from gangline_basics.launch.interface import find_interface
from gangline_basics.launch.starts import JobStart
from gangline_testkit.real_runs import SMALL, RealRuns

# Each simulated machine has its own network, its own processes, and a host name that does not resolve.
TWO = """
ip link set lo up
for n in 1 2; do
    unshare -n -u -p -f --kill-child --mount-proc sleep 600 > /dev/null 2>&1 & outer[$n]=$!
done
trap 'kill -9 ${outer[@]}' EXIT  # unshare takes no SIGTERM
for n in 1 2; do
    until inner[$n]=$(cat /proc/${outer[$n]}/task/${outer[$n]}/children) && [ -n "${inner[$n]}" ]; do sleep 0.1; done
    inner[$n]=$(echo ${inner[$n]})
done
sleep 0.5
ip link add c1 type veth peer name c2
for n in 1 2; do
    ip link set c$n netns ${inner[$n]}
    nsenter -t ${inner[$n]} -n -u -p -m sh -c "hostname node$n; ip link set lo up; ip addr add 10.7.0.$n/24 dev c$n;
        ip link set c$n up"
done
for n in 1 2; do
    GANGLINE_NODE=10.7.0.$n nsenter -t ${inner[$n]} -n -u -p -m "$@" > "$PWD/$n.txt" 2>&1 & ran[$n]=$!
done
wait ${ran[1]} && wait ${ran[2]}
"""
UNSHARE = ["unshare", "--map-root-user", "--net", "--uts"]


def can_have_machines() -> bool:
    if not (shutil.which("unshare") and shutil.which("nsenter") and shutil.which("ip")):
        return False
    make = "ip link add c1 type veth peer name c2 && unshare -n -u -p -f --mount-proc true"
    return subprocess.run([*UNSHARE, "sh", "-c", make], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_interface_is_found_by_route_to_host():
    assert find_interface(["no.such.host.invalid", "127.0.0.2"]) == "lo"


class NowhereToGo(socket.socket):
    """Socket that cannot connect to any host. On a real network, each attempt would take long."""

    asked: ClassVar[list[object]] = []

    def connect(self, address):
        self.asked.append(address)
        raise OSError("no such host")


def test_interface_search_tries_first_three_hosts(monkeypatch):
    monkeypatch.setattr(socket, "socket", NowhereToGo)
    assert find_interface([f"host{index}" for index in range(1000)]) is None
    assert [host for host, _ in NowhereToGo.asked] == ["host0", "host1", "host2"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_interface_is_found_by_peer_address(tmp_path, monkeypatch):
    """Check node names that no name service knows, and loopback, which does not lead to other machines."""
    ways = {"10.0.0.1": "ib0", "10.0.0.2": "ib0", "n1": "lo", "n2": "eth0"}
    monkeypatch.setattr(elastic, "find_interface", lambda hosts: next(ways[h] for h in hosts if h in ways))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def interface(name, first, nodes, peers=()):
        files = RankFiles(tmp_path, AgentNode(name, 1, None, lambda: 1, alone=False))
        files.start, files.peers = JobStart(1, tuple(nodes), 2, 0), list(peers)
        return files._find_interface(first)

    assert interface("n1", "10.0.0.1", ["n1", "n2"], ["10.0.0.2"]) == "ib0"
    assert interface("n2", "10.0.0.1", ["n1", "n2"]) == "ib0"
    assert interface("n2", "n1", ["n1", "n2"]) is None  # n1 resolves to a loopback address here
    assert interface("n1/0", "127.0.0.1", ["n1/0", "n1/1"]) == "lo"
    assert interface("n1", "127.0.0.1", ["n1", "n2"], ["10.0.0.2"]) == "ib0"


@pytest.mark.nightly
@pytest.mark.skipif(not can_have_machines(), reason="no network namespaces here")
@pytest.mark.parametrize("agents", [1, 2])
def test_two_machines_train_together(tmp_path, agents):
    """Train on two machines that cannot reach each other by 127.0.0.1 or by their host names."""
    with RealRuns(tmp_path, SMALL) as runs:
        nodes = 2 * agents
        out = runs.directory / "out"  # absolute: `nsenter -m` changes to the root directory
        words = [f"run.dir={out}", "parallel=ddp", "launch=elastic", f"launch.nodes={nodes}", f"launch.agents={agents}"]
        words += [f"launch.processes={nodes}", "launch.timeout_seconds=60", "launch.futile_restarts=1"]
        runs.finish(runs.start(*words, prefix=[*UNSHARE, "bash", "-c", TWO, "bash"]))
        assert [record["step"] for record in runs.read_records("out")] == list(range(1, 7))
