"""One trial: something happens to a server while a job runs; what was lost, and how long no decision came."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple, get_args

import msgspec
from bench.failover.bystander import Bystander
from bench.failover.minority import Cut, MinorityView
from bench.failover.partition import HostServer, client_beside
from bench.failover.servers import ClusterServer, ThreeServers
from bench.harness.steady_job import SteadyJob
from bench.messages.stored import stored_messages

from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Report
from dynamix.schemas.streams import ACTIONS, FEED

Fault = Literal["none", "leader-kill", "leader-freeze", "minority-partition", "rolling-restart"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
PARTITION: Fault = "minority-partition"
"""Needs servers on hosts, each with a link that can be cut."""
BACK_TIMEOUT_S = 90.0
BEFORE_S = 1.0
AFTER_S = 2.0
"""Judged before the fault, and after decisions are back."""
CALM_S = 5.0
"""A trial in which nothing happens takes so long."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one fault."""

    fault: Fault
    server: str
    """The one that it happened to."""
    stream: str
    """It led this one."""
    acknowledged: int
    """Messages of the bystander, reports and actions."""
    lost: int
    """Acknowledged and not in the stream afterwards, or with other content."""
    longest_wait_s: float
    """From a window's report to its action at the reader, at most: so long was the job without decisions."""
    num_windows: int
    out_of_chain: int = 0
    """Actions that did not follow the one before them."""
    minority: MinorityView | None = None
    """What a client beside the server saw, where that was cut off; its messages are in the counts above, too."""


class Scene(NamedTuple):
    """What a fault happens to."""

    servers: ThreeServers
    bus: Bus
    job: SteadyJob


async def run_trial(scene: Scene, fault: Fault, number: int, stream: str) -> Trial:
    """One fault, from a cluster that is whole to one that is whole again, to the server that leads a stream.

    `number` is another one in each trial: it names the bystander's messages.
    """
    bystander, begin = Bystander(scene.bus, number), len(scene.job.reported_at)
    out_of_chain = scene.job.num_out_of_chain()
    await asyncio.sleep(BEFORE_S)
    server = await scene.servers.leader_of(scene.bus, stream)
    minority = await _HAPPENS[fault](scene, server)
    await scene.servers.until_current(scene.bus)
    async with scene.job.paused(BACK_TIMEOUT_S):
        windows = range(begin, len(scene.job.reported_at))
        lost, acknowledged = await bystander.num_lost(), bystander.num_acknowledged + 2 * len(windows)
        if minority is not None:
            lost, acknowledged = lost + minority.lost, acknowledged + minority.acknowledged
        return Trial(
            fault=fault,
            server=server.name,
            stream=stream,
            acknowledged=acknowledged,
            lost=lost + await _lost_reports(scene, windows) + await _lost_actions(scene, windows),
            longest_wait_s=max(scene.job.waits_s(windows)),
            num_windows=len(windows),
            out_of_chain=scene.job.num_out_of_chain() - out_of_chain,
            minority=minority,
        )


async def _nothing(_scene: Scene, _server: ClusterServer) -> None:
    await asyncio.sleep(CALM_S)


async def _leader_kill(scene: Scene, server: ClusterServer) -> None:
    await server.kill()
    await _until_back(scene)
    await server.start()


async def _leader_freeze(scene: Scene, server: ClusterServer) -> None:
    server.freeze()
    try:
        await _until_back(scene)
    finally:
        server.thaw()


async def _minority_partition(scene: Scene, server: ClusterServer) -> MinorityView:
    """The job and the services are on the side of the other two; a client beside this one goes on with it alone."""
    assert isinstance(server, HostServer), "only a host's link can be cut"
    async with client_beside(server, scene.servers.settings, scene.job.job.job) as client:
        began_at = time.monotonic()
        server.place.cut()
        try:
            await _until_back(scene)
            await client.until("left")
        finally:
            ended_at = time.monotonic()
            server.place.restore()
        await scene.servers.until_current(scene.bus)
        whole_after_s = time.monotonic() - ended_at
        view = await client.view(Cut(began_at=began_at, ended_at=ended_at))
        return msgspec.structs.replace(view, whole_after_s=whole_after_s)


async def _rolling_restart(scene: Scene, _server: ClusterServer) -> None:
    for server in scene.servers.servers.values():
        await server.restart()
        await scene.servers.until_current(scene.bus)
    await _until_back(scene)


_HAPPENS: dict[Fault, Callable[[Scene, ClusterServer], Awaitable[MinorityView | None]]] = {
    "none": _nothing,
    "leader-kill": _leader_kill,
    "leader-freeze": _leader_freeze,
    "minority-partition": _minority_partition,
    "rolling-restart": _rolling_restart,
}


async def _until_back(scene: Scene) -> None:
    """Wait until a window that is reported from now on was decided, and a little longer."""
    await scene.job.until_decided(len(scene.job.reported_at), BACK_TIMEOUT_S)
    await asyncio.sleep(AFTER_S)


async def _lost_reports(scene: Scene, windows: range) -> int:
    """Reports of some windows that FEED does not have; all were acknowledged."""
    job = scene.job.job
    found = await stored_messages(scene.bus, FEED.name, subjects.of("report", job.job, job.nodes[0].node))
    kept = {decode(Report, message.subject, message.payload).window for message in found}
    return len(set(windows) - kept)


async def _lost_actions(scene: Scene, windows: range) -> int:
    """Actions of some windows that the reader had and ACTIONS has not, or has otherwise."""
    found = await stored_messages(scene.bus, ACTIONS.name, subjects.of("action", scene.job.job.job))
    kept = {action.window: action for action in (decode(Action, one.subject, one.payload) for one in found)}
    return sum(action.window in windows and kept.get(action.window) != action for action in scene.job.actions)
