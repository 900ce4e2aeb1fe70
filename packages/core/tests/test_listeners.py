"""Listening sockets of a run: a run on one machine listens only on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

from gangline.comm.job_store import ADDRESS, open_job_store
from gangline.launch.network import find_listening_address
from gangline_testkit import warm
from gangline_testkit.ports import free_port
from gangline_testkit.processes import find_rank_processes
from gangline_testkit.real_runs import SMALL, RealRuns

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LISTENS = "0A"  # state of a listening socket in /proc/net/tcp


def listening_sockets(pids: list[int]) -> dict[str, str]:
    """Return the addresses at which processes listen, by the inode of the socket."""
    held = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *fields = line.split()
            if state == LISTENS and fields[5] in held:
                found[fields[5]] = address_of(local.partition(":")[0])
    return found


def address_of(digits: str) -> str:
    """Return the address in /proc/net/tcp, where the bytes of each 32-bit word are in reverse order."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return str(ip_address(b"".join(words)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(("parallel=single",), False, marks=pytest.mark.nightly),
        (("parallel=ddp", "launch.processes=2"), True),
        (("parallel=ddp", "launch=elastic", "launch.nodes=2", "launch.agents=2", "launch.processes=2"), True),
        pytest.param(
            ("parallel=ddp", "launch=elastic", "launch.nodes=1", "launch.processes=2"), True, marks=pytest.mark.nightly
        ),
    ],
    ids=["single", "ddp", "two_agents", "one_node"],
)
def test_run_on_one_machine_listens_only_on_loopback(tmp_path, words, expected):
    with RealRuns(tmp_path, SMALL) as runs:
        before = {*warm.get_server().list_processes()}  # processes of an earlier test may still end
        process = runs.fork("run.dir=out", "run.steps=100000", *words)
        runs.wait_for_step(process, "out", 2)
        started = [pid for pid in warm.get_server().list_processes() if pid not in before]
        assert {*find_rank_processes(tmp_path / "out").values()} <= {*started}
        found = listening_sockets(started)
    assert [address for address in found.values() if not ip_address(address).is_loopback] == []
    assert bool(found) == expected, "a job of several ranks has a store"


def store_of_rank_0(address: str, **more: str) -> dict[str, str]:
    """Open the job store of rank 0 with MASTER_ADDR=`address`, and return the sockets at which this process listens."""
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(free_port()), **more}
    store = open_job_store(timedelta(seconds=20), waits=False, environ=environ)
    again = open_job_store(timedelta(seconds=20), waits=False, environ=environ)
    store.set("key", "value")
    assert again.get("key") == b"value", "the second store of a process is that of the first"
    return listening_sockets([os.getpid()])


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.0.2", "::1"])
def test_store_on_loopback_address_listens_only_on_loopback(address):
    before = listening_sockets([os.getpid()])
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    assert all(
        ip_address(found).is_loopback for inode, found in store_of_rank_0(address).items() if inode not in before
    )


def test_torchrun_agent_store_is_reused():
    serving = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    agent = open_job_store(timedelta(seconds=20), environ=serving)
    before = listening_sockets([os.getpid()])
    joined = open_job_store(timedelta(seconds=20), environ={**serving, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    agent.set("key", "value")
    assert joined.get("key") == b"value"
    assert listening_sockets([os.getpid()]) == before


def test_store_listens_at_configured_address():
    before = listening_sockets([os.getpid()])
    found = store_of_rank_0("localhost", **{ADDRESS: "127.0.0.3"})
    assert [found[inode] for inode in found.keys() - before.keys()] == ["127.0.0.3"]


@pytest.mark.parametrize(
    ("name", "stands_for", "route", "address"),
    [
        ("n1", ["10.0.0.1"], "", "10.0.0.1"),
        ("n1", ["10.0.0.1", "10.1.0.1"], "10.1.0.1", "10.1.0.1"),  # with several addresses the route decides
        ("n1", ["10.0.0.1", "10.1.0.1"], "", ""),
        ("n1", ["127.0.1.1"], "10.0.0.1", "10.0.0.1"),  # Debian maps the machine's own name to this address
        ("n1", ["127.0.1.1"], "127.0.0.1", ""),
        ("n1", ["192.0.2.7"], "", ""),  # an address of another machine, as with a forwarded port
        ("n1", [], "10.1.0.1", "10.1.0.1"),
        ("127.0.0.1", [], "10.1.0.1", "127.0.0.1"),
        ("::1", [], "", "::1"),
        ("localhost", [], "10.1.0.1", "127.0.0.1"),
    ],
)
def test_listening_address_is_reachable_by_clients(monkeypatch, name, stands_for, route, address):
    from gangline.launch import network

    def resolve(name, *_, **__):
        if not stands_for:
            raise socket.gaierror("no such host")
        return [(None, None, None, "", (found, 0)) for found in stands_for]

    monkeypatch.setattr(network.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(network, "_is_local", lambda address: address.startswith("10."))
    monkeypatch.setattr(network, "address_towards", lambda hosts: route)
    assert find_listening_address(name, ["n2"]) == address
