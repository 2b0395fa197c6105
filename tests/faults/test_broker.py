"""Repeated SIGKILL of the broker: all services reconnect, and no acknowledged message is missing."""

import asyncio
import random

import pytest
from tests.support.bus_watch import watching
from tests.support.control_plane import ControlPlane, one_node_job, report_of
from tests.support.decision_checks import check_decisions
from tests.support.faults import Figure, Scale
from tests.support.server_cluster import Bystander

from dynamix.schemas import subjects
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import FEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("services")]


async def test_no_acknowledged_message_is_missing_after_broker_kills(
    plane: ControlPlane, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    """Reports go in all the time; every one becomes a window, a state, a reward and, with the others, actions."""
    num_kills, every_s, job = scale(2, 15), scale(1.5, 4.0), one_node_job()
    await plane.bus.publish(job)
    # messages without a reader, so that the broker is storing when it is killed
    bystander, stop = Bystander(plane.bus, 0, pause_s=0), asyncio.Event()
    reporting = asyncio.create_task(_report(plane, job, stop))
    for _ in range(num_kills):
        await asyncio.sleep(every_s * chance.uniform(0.6, 0.9))  # the time between two crashes
        await plane.server.kill()
        await asyncio.sleep(every_s * 0.1)  # the outage
        await plane.server.start()
    stop.set()
    num_windows = await reporting
    num_missing = await bystander.num_lost()
    async with watching(plane.bus, job.job) as watch:
        await watch.until_decided(num_windows)
        for kind in ("window", "state", "reward"):
            found = await plane.wait_for(FEED.name, subjects.of(kind, job.job, "*"), num_windows)
            assert sorted(message.window for message in found) == list(range(num_windows))  # type: ignore[attr-defined]
        await check_decisions(plane.bus, job, num_windows=num_windows)
    assert all(service.exit_code() is None for service in plane.services.values())
    assert num_missing == 0
    figure("broker_kills", num_kills)
    figure("acknowledged", bystander.num_acknowledged + num_windows)
    figure("acknowledged_and_missing", num_missing)


async def _report(plane: ControlPlane, job: Job, stop: asyncio.Event) -> int:
    """Report windows at a steady pace; returns how many, all acknowledged."""
    futures: list[asyncio.Future[int]] = []
    while not stop.is_set():
        speeds = tuple(1000.0 * (3 - rank % 3) + 40 * ((len(futures) * 7 + rank * 13) % 11) for rank in range(4))
        futures.append(await plane.bus.publish_soon(report_of(job, len(futures), (128,) * 4, speeds)))
        await asyncio.sleep(0.05)
    await asyncio.gather(*futures)
    return len(futures)
