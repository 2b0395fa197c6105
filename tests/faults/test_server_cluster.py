"""A broker of three servers that loses one: nothing acknowledged is lost, and decisions come back."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable

import pytest
from bench.hosts import Hosts
from bench.jobs import SteadyJob, running_job
from tests.support.brokers import connected
from tests.support.bus_watch import stored_messages
from tests.support.decision_checks import check_chain
from tests.support.faults import Figure, Scale
from tests.support.server_cluster import NUM_SERVERS, Bystander, ClusterServer, ThreeServers, servers_on

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Report
from dynamix.schemas.streams import ACTIONS, REPORTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BACK_TIMEOUT_S = 200.0
UntilBack = Callable[[], Awaitable[None]]
"""Waits until a window that is reported from now on is decided."""


async def kill(server: ClusterServer, until_back: UntilBack) -> None:
    await server.kill()
    await until_back()
    await server.start()


async def freeze(server: ClusterServer, until_back: UntilBack) -> None:
    server.pause()
    try:
        await until_back()
    finally:
        server.go_on()


async def cut_off(server: ClusterServer, until_back: UntilBack) -> None:
    assert server.place is not None
    server.place.cut()
    try:
        await until_back()
    finally:
        server.place.cut(is_cut=False)


async def test_a_cluster_that_loses_servers_loses_no_message_and_no_decision(scale: Scale, figure: Figure) -> None:
    """A leader is killed, frozen and (root may make hosts with links) cut off; then all three restart in turn."""
    faults = [kill, freeze] + ([cut_off] if os.geteuid() == 0 else [])
    rounds = scale(1, 5)
    async with contextlib.AsyncExitStack() as stack:
        if os.geteuid() == 0:
            hosts = stack.enter_context(Hosts(NUM_SERVERS))
            stack.enter_context(hosts.entered())
            servers = await stack.enter_async_context(servers_on(hosts))
        else:
            servers = await stack.enter_async_context(ThreeServers())
        bus = await stack.enter_async_context(connected(servers.settings))
        await provision(bus, num_replicas=NUM_SERVERS)
        await servers.until_current(bus)
        job = await stack.enter_async_context(running_job(servers.settings, bus))
        bystander = Bystander(bus, 0)

        async def until_back() -> None:
            await job.until_decided(len(job.reported_at), BACK_TIMEOUT_S)

        for number in range(rounds):
            for happens in faults:
                await asyncio.sleep(1.0)  # the cluster works
                leader = await servers.leader_of(bus, (REPORTS, ACTIONS)[number % 2].name)
                await happens(leader, until_back)
                await servers.until_current(bus)
            for server in servers.servers.values():
                await server.restart()
                await servers.until_current(bus)
            await until_back()
        async with job.paused(BACK_TIMEOUT_S):
            num_lost = await bystander.num_lost() + await num_lost_windows(bus, job)
        assert num_lost == 0
        assert job.num_out_of_chain() == 0
        check_chain(job.actions)
        figure("faults", rounds * (len(faults) + 1))
        figure("acknowledged", bystander.num_acknowledged + 2 * len(job.reported_at))
        figure("acknowledged_and_missing", num_lost)
        figure("longest_without_decisions_s", max(job.waits_s(range(len(job.reported_at)))))


async def num_lost_windows(bus: Bus, job: SteadyJob) -> int:
    """Windows whose report is not in REPORTS, and actions that ACTIONS has otherwise than they were read."""
    reports = await stored_messages(bus, REPORTS.name, subjects.of("report", job.job.job, job.job.nodes[0].node))
    kept = {decode(Report, message.subject, message.payload).window for message in reports}
    found = await stored_messages(bus, ACTIONS.name, subjects.of("action", job.job.job))
    actions = {action.window: action for action in (decode(Action, one.subject, one.payload) for one in found)}
    return len(set(range(len(job.reported_at))) - kept) + sum(actions.get(a.window) != a for a in job.actions)
