"""Everything that steers a job across hosts: broker, reward and arbitrator at the switch, a collector on every host."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Literal, NamedTuple

from bench.harness.broker import broker_with_bus
from bench.harness.command import BenchmarkError

from dynamix.cli.services import ServiceProcess, bus_environment
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Live

from .cluster import Hosts
from .host import Host

Probe = Literal["auto", "ebpf", "tcp_info", "proc"]
"""How collectors read the network."""

CONTROL_SERVICES = ("reward", "arbitrator")
CONTROL_NODE = "control"
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
MAX_LOG_CHARACTERS = 3000

Environ = dict[str, str]
Collectors = dict[str, subprocess.Popen[bytes]]
"""By node."""


class ClusterError(BenchmarkError):
    """A service or the job failed; the text holds the end of its log."""


class ClusterServices(NamedTuple):
    """What a job needs of them."""

    bus: Bus
    environ: Environ
    """For every process: ours, and how to reach the broker."""


def node_of(host: Host) -> str:
    """A host's name on the bus."""
    return f"host-{host.index}"


def end_of(log: Path) -> str:
    """The end of a log, from its first traceback on where there is one."""
    text = log.read_text(errors="replace")
    start = text.find("Traceback")
    return text[start : start + MAX_LOG_CHARACTERS] if start >= 0 else text[-MAX_LOG_CHARACTERS:]


@contextlib.asynccontextmanager
async def services(hosts: Hosts, probe: Probe, directory: Path) -> AsyncIterator[ClusterServices]:
    """All of them, ready; the calling thread must have entered the switch, and be the main one.

    Raises:
        ClusterError: when a service ends at once, or is not ready in `READY_TIMEOUT_S`.
    """
    log = directory / "services.log"
    async with broker_with_bus("bench-cluster", hosts.address) as (server, bus):
        environ = {**os.environ, **bus_environment(server.settings), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output, contextlib.ExitStack() as stack:
            for name in CONTROL_SERVICES:
                service = ServiceProcess(name, {**environ, "DYNAMIX_NODE": CONTROL_NODE}, output)
                stack.callback(service.stop)
                service.start()
            collectors = stack.enter_context(_collectors(hosts, probe, environ, output))
            await _wait_until_ready(bus, collectors, log)
            yield ClusterServices(bus, environ)


@contextlib.contextmanager
def _collectors(hosts: Hosts, probe: Probe, environ: Environ, output: IO[bytes]) -> Iterator[Collectors]:
    """One per host, before any rank: eBPF knows the sockets that are opened while it is attached."""
    children: Collectors = {}
    try:
        for host in hosts:
            own = {
                "DYNAMIX_NODE": node_of(host),
                "DYNAMIX_COLLECTOR_PROBE": probe,
                "DYNAMIX_COLLECTOR_CGROUP": str(host.cgroup),
            }
            command = [sys.executable, "-m", "dynamix.collector"]
            child = host.popen(command, env={**environ, **own}, stdout=output, stderr=output)
            children[node_of(host)] = child
        yield children
    finally:
        for child in children.values():
            child.terminate()
        for child in children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed with its host
                child.wait(STOP_TIMEOUT_S)


async def _wait_until_ready(bus: Bus, collectors: Collectors, log: Path) -> None:
    """Until every service has said that it listens to its streams."""
    missing = {(name, CONTROL_NODE) for name in CONTROL_SERVICES} | {("collector", node) for node in collectors}
    try:
        async with asyncio.timeout(READY_TIMEOUT_S), bus.subscribe(subjects.of("live", "*", "*")) as beats:
            async for message in beats:
                beat = decode(Live, message.subject, message.payload)
                if beat.counters.get("ready"):
                    missing.discard((beat.service, beat.node))
                if not missing:
                    return
                for node, child in collectors.items():
                    if child.poll() is not None:
                        raise ClusterError(f"the collector of {node} ended at once:\n{end_of(log)}")
    except TimeoutError:
        names = ", ".join(f"{service} of {node}" for service, node in sorted(missing))
        raise ClusterError(f"not ready after {READY_TIMEOUT_S:g} s: {names}; from their log:\n{end_of(log)}") from None
