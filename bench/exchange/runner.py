"""Processes on hosts, one on each, that have joined each other; they are asked cases and answer what they measured."""

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from bench.exchange.arms import SERVERS_VARIABLE
from bench.exchange.figures import MeasuredArm, MeasuredCase, speedups
from bench.exchange.plan import LinkedCase, link_named
from bench.exchange.rank import ArmTimings
from bench.hosts import Host, Hosts
from bench.hosts.services import ClusterError, end_of

T = TypeVar("T")
C = TypeVar("C", bound=LinkedCase)
R = TypeVar("R", bound=MeasuredCase[MeasuredArm])

MASTER_PORT = "29500"
"""Free, since the network belongs to these hosts alone."""
SERVER_PORT = "29600"
STOP_TIMEOUT_S = 30.0


class Servers(NamedTuple):
    """Gradient servers that run."""

    hosts: Sequence[Host]
    addresses: str
    """With commas between."""


class JoinedRanks:
    """Ranks that answer one line for each line that they are sent."""

    def __init__(self, hosts: Sequence[Host], processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
        """Hosts are those of ranks and servers."""
        self._hosts = hosts
        self._processes = processes
        self._logs = logs

    def ask(self, case: Any, link: str, answer: type[T]) -> list[T]:
        """What each rank answers to a case, in rank order, with all links at a rate.

        Raises:
            ClusterError: when a rank ended instead.
        """
        for host in self._hosts:
            host.set_link(link_named(link))
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(case) + b"\n")
            process.stdin.flush()
        return [msgspec.json.decode(self.read_line(rank), type=answer) for rank in range(len(self._processes))]

    def read_line(self, rank: int) -> bytes:
        """What a rank says next.

        Raises:
            ClusterError: when it says no more; the others then end, too.
        """
        process = self._processes[rank]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ClusterError(f"rank {rank} ended with code {process.wait()}:\n{end_of(self._logs[rank])}")
        return line


@contextlib.contextmanager
def gradient_servers(hosts: Sequence[Host], directory: Path) -> Iterator[Servers]:
    """A gradient server on each host, ended at exit.

    Raises:
        ClusterError: when one does not listen.
    """
    servers, addresses = [], []
    command = [sys.executable, "-m", "dynamix.cli.main", "serve-gradients", "--port", SERVER_PORT]
    for host in hosts:
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        log = directory / f"server-{host.index}.log"
        with log.open("wb") as output:
            servers.append(host.popen(command, env=environ, stdout=subprocess.PIPE, stderr=output))
        addresses.append(f"{host.address}:{SERVER_PORT}")
    for host, server in zip(hosts, servers, strict=True):
        assert server.stdout is not None
        if not server.stdout.readline():
            log = directory / f"server-{host.index}.log"
            raise ClusterError(f"the gradient server on host {host.index} ended:\n{end_of(log)}")
    try:
        yield Servers(hosts, ",".join(addresses))
    finally:
        for server in servers:
            server.terminate()
            server.communicate(timeout=STOP_TIMEOUT_S)


@contextlib.contextmanager
def joined_ranks(
    hosts: Sequence[Host], servers: Servers, module: str, plan: Any, directory: Path
) -> Iterator[JoinedRanks]:
    """A process of a module on each host, joined over links as fast as memory; ended at exit.

    Args:
        hosts: one for each rank.
        servers: those that run.
        module: what `python -m` runs; its argument is the plan.
        plan: what JSON knows, and msgspec.Struct.
        directory: for their logs.
    """
    logs = [directory / f"{len(hosts)}-{host.index}.log" for host in hosts]
    processes = []
    for host, log in zip(hosts, logs, strict=True):
        own = {
            "RANK": str(host.index),
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": MASTER_PORT,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            SERVERS_VARIABLE: servers.addresses,
        }
        command = [sys.executable, "-m", module, msgspec.json.encode(plan).decode()]
        with log.open("wb") as output:
            process = host.popen(
                command, env={**os.environ, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output
            )
        processes.append(process)
    all_hosts = [*hosts, *servers.hosts]
    ranks = JoinedRanks(all_hosts, processes, logs)
    for rank in range(len(hosts)):
        ranks.read_line(rank)
    try:
        yield ranks
    finally:
        for host in all_hosts:
            host.set_link(None)
    for rank, process in enumerate(processes):
        process.communicate(timeout=STOP_TIMEOUT_S)
        if process.returncode:  # every case was answered before
            sys.stderr.write(f"rank {rank} ended with code {process.returncode}:\n{end_of(logs[rank])}\n")


def run_cases(
    cases: Sequence[C], module: str, plan: Any, summarise: Callable[[C, Sequence[Mapping[str, ArmTimings]]], R]
) -> list[R]:
    """Run one case after the other, those of as many ranks behind each other by the same processes.

    Args:
        cases: in order.
        module: what a rank runs.
        plan: for `module`.
        summarise: makes a result of a case and all ranks' timings, by arm.

    Raises:
        HostsError: when there can be no such hosts here, or this user may not make them.
        ClusterError: when a rank fails.
    """
    results = []
    most = max(case.num_ranks + case.num_servers for case in cases)
    with Hosts(most) as hosts, tempfile.TemporaryDirectory(prefix="dynamix-exchange-") as directory:
        for (num_ranks, num_servers), alike in itertools.groupby(
            cases, key=lambda case: (case.num_ranks, case.num_servers)
        ):
            served_by = hosts[num_ranks : num_ranks + num_servers]
            with (
                gradient_servers(served_by, Path(directory)) as servers,
                joined_ranks(hosts[:num_ranks], servers, module, plan, Path(directory)) as ranks,
            ):
                for case in alike:
                    results.append(summarise(case, ranks.ask(case, case.link, dict[str, ArmTimings])))
                    sys.stderr.write(f"  {speedups(results[-1])}\n")
    return results
