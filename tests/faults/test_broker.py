"""Repeated SIGKILL of the broker: all services reconnect, and no acknowledged message is missing."""

import asyncio
import functools
import random

import pytest
from tests.support.arbitrators import Feeding
from tests.support.control_plane import ControlPlane, feed_windows, one_node_job
from tests.support.decision_checks import check_all_there
from tests.support.faults import Figure, Scale
from tests.support.server_cluster import Bystander

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("services")]


async def test_no_acknowledged_message_is_missing_after_broker_kills(
    plane: ControlPlane, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    """Reports go in all the time; every one becomes a window, a state, a reward and, with the others, actions."""
    num_kills, every_s, job = scale(2, 15), scale(1.5, 4.0), one_node_job()
    await plane.bus.publish(job)
    # messages without a reader, so that the broker is storing when it is killed
    bystander = Bystander(plane.bus, 0, pause_s=0)
    feeding = Feeding(functools.partial(feed_windows, plane, job, every_s=0.05))
    for _ in range(num_kills):
        await asyncio.sleep(every_s * chance.uniform(0.6, 0.9))  # the time between two crashes
        await plane.server.kill()
        await asyncio.sleep(every_s * 0.1)  # the outage
        await plane.server.start()
    num_windows = await feeding.finish()
    num_missing = await bystander.num_lost()
    await check_all_there(plane, job, num_windows)
    assert all(service.exit_code() is None for service in plane.services.values())
    assert num_missing == 0
    figure("broker_kills", num_kills)
    figure("acknowledged", bystander.num_acknowledged + num_windows)
    figure("acknowledged_and_missing", num_missing)
