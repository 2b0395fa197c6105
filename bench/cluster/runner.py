"""Runs jobs across hosts, one after the other with the same services: a rank on each host, slow as planned."""

import asyncio
import contextlib
import secrets
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from bench.cluster.display import describe
from bench.cluster.plan import Arm, ClusterPlan
from bench.cluster.summary import ClusterResult, JobMessages, summarise
from bench.hosts import Host, Hosts
from bench.hosts.services import ClusterError, ClusterServices, end_of, node_of, services

from dynamix.cli.progress import ProgressLine
from dynamix.collector.procfs.proc import NamespaceTraffic
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode_any
from dynamix.schemas.messages import Message, MetricWindow
from dynamix.schemas.streams import ACTIONS, FEED

ROOT = Path(__file__).parents[2]
MASTER_PORT = "29500"
"""Free, since the network belongs to these hosts alone."""
LAST_MESSAGES_TIMEOUT_S = 10.0
PROGRESS_EVERY_S = 3.0

Waiting = asyncio.Future[Any]


def run_all(runs: Sequence[tuple[ClusterPlan, Arm]]) -> list[ClusterResult]:
    """Run one after the other; all plans have as many hosts and the same probe.

    Raises:
        HostsError: when there can be no such hosts here, or this user may not make them.
        ClusterError: when a service or a rank fails.
        ValueError: when nothing was seen of a run.
    """
    with Hosts(runs[0][0].num_hosts) as hosts, hosts.entered():
        return asyncio.run(_run_all(hosts, runs))


async def _run_all(hosts: Hosts, runs: Sequence[tuple[ClusterPlan, Arm]]) -> list[ClusterResult]:
    results = []
    with tempfile.TemporaryDirectory(prefix="dynamix-cluster-") as name:
        async with services(hosts, runs[0][0].probe, Path(name)) as running:
            for plan, arm in runs:
                results.append(await _Run(hosts, running, plan, arm, Path(name)).run())
                step_ms = 1e3 * results[-1].step_time_s.median
                sys.stderr.write(f"  {arm.label}, {describe(plan)}: {step_ms:.0f} ms a step\n")
    return results


class _Run:
    """One job; everything in its result was read from the bus, except the hosts' own counters."""

    def __init__(self, hosts: Hosts, running: ClusterServices, plan: ClusterPlan, arm: Arm, directory: Path) -> None:
        self._hosts = hosts
        self._services = running
        self._plan = plan
        self._arm = arm
        self._directory = directory
        self._job = f"cluster-{arm.policy}-{secrets.token_hex(4)}"
        self._seen = JobMessages(plan.num_hosts, plan.num_windows)
        self._complete = asyncio.Event()
        self._progress = ProgressLine(PROGRESS_EVERY_S)

    async def run(self) -> ClusterResult:
        before = self._traffic()
        followers = asyncio.gather(
            self._follow(
                FEED.name, [subjects.of("window", self._job, subjects.ANY), subjects.of("applied", self._job)]
            ),
            self._follow(ACTIONS.name, [subjects.of("action", self._job)]),
        )
        try:
            after = await self._train(followers)
            with contextlib.suppress(TimeoutError):  # then the result says how many are missing
                async with asyncio.timeout(LAST_MESSAGES_TIMEOUT_S):
                    await _reach(self._complete.wait(), followers)
        finally:
            self._free()
            await _cancel(followers)
        traffic = [_difference(*pair) for pair in zip(before, after, strict=True)]
        return summarise(self._plan, self._arm, self._seen, traffic)

    async def _train(self, followers: Waiting) -> list[NamespaceTraffic]:
        """From the first rank's start to the last one's end; what the hosts had counted once all windows were seen."""
        ranks = [await self._start_rank(host) for host in self._hosts]
        ended = asyncio.gather(*(self._end_of(rank, host) for rank, host in zip(ranks, self._hosts, strict=True)))
        try:
            await _reach(asyncio.gather(*map(_attached, ranks)), ended, followers)
            self._slow_down()
            for rank in ranks:
                _let_go(rank)
            await _reach(self._complete.wait(), ended, followers)
            traffic = self._traffic()
            self._free()
            await ended
        finally:
            await _cancel(ended)
            await asyncio.gather(*map(_kill, ranks))
        return traffic

    def _traffic(self) -> list[NamespaceTraffic]:
        return [host.namespace.traffic() for host in self._hosts]

    async def _follow(self, stream: str, wanted: list[str]) -> None:
        async with self._services.bus.consume(stream, wanted, start="all") as consumer:
            async for batch in consumer:
                for message in batch:
                    self._record(decode_any(message.subject, message.payload))

    def _record(self, message: Message) -> None:
        self._seen.record_message(message)
        if self._seen.is_complete:
            self._complete.set()
        if isinstance(message, MetricWindow):
            step_ms, num_applied = 1e3 * message.job_metrics.step_time_s, len(self._seen.applied)
            place = f"window {message.window + 1} of {self._plan.num_windows}"
            self._progress.show(f"  {self._arm.label}: {place}, {step_ms:.0f} ms, {num_applied} actions applied")

    async def _start_rank(self, host: Host) -> Process:
        argument = msgspec.json.encode((self._plan, self._arm)).decode()
        own = {
            "RANK": str(host.index),
            "WORLD_SIZE": str(len(self._hosts)),
            "MASTER_ADDR": self._hosts[0].address,
            "MASTER_PORT": MASTER_PORT,
            "GLOO_SOCKET_IFNAME": "eth0",
            "DYNAMIX_JOB": self._job,
            "DYNAMIX_NODE": node_of(host),
        }
        command = host.command(sys.executable, "-m", "bench.cluster.job", argument)
        with self._log(host).open("wb") as log:
            environ = {**self._services.environ, **own}
            return await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, env=environ, stdin=PIPE, stdout=PIPE, stderr=log
            )

    async def _end_of(self, rank: Process, host: Host) -> None:
        if code := await rank.wait():
            raise ClusterError(f"rank {host.index} ended with code {code}:\n{end_of(self._log(host))}")

    def _log(self, host: Host) -> Path:
        return self._directory / f"{self._job}-{host.index}.log"

    def _slow_down(self) -> None:
        for rank, host in enumerate(self._hosts):
            host.set_link(self._plan.link_of(rank))
            host.set_cores(self._plan.slow_cpus.get(rank, self._plan.cores))

    def _free(self) -> None:
        for host in self._hosts:
            host.set_link(None)
            host.set_cores(None)


async def _attached(rank: Process) -> None:
    assert rank.stdout is not None
    await rank.stdout.readline()


def _let_go(rank: Process) -> None:
    assert rank.stdin is not None
    rank.stdin.write(b"go\n")


async def _reach(goal: Awaitable[Any], *others: Waiting) -> None:
    """Until the goal is reached, or one of the others is done: what that raised is raised."""
    waiting = asyncio.ensure_future(goal)
    try:
        await asyncio.wait([waiting, *others], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(waiting)
    for other in others:
        if other.done():
            other.result()


async def _cancel(waiting: Waiting) -> None:
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def _kill(rank: Process) -> None:
    if rank.returncode is None:
        rank.kill()
    await rank.wait()


def _difference(before: NamespaceTraffic, after: NamespaceTraffic) -> NamespaceTraffic:
    return NamespaceTraffic(*(now - then for then, now in zip(before, after, strict=True)))
