"""kill -9 of collector and reward while a job reports, and replicas of them: each window is rewarded once."""

import asyncio
import random

import pytest
from tests.support.bus_watch import watching
from tests.support.control_plane import ControlPlane, feed_windows, one_node_job
from tests.support.decision_checks import check_all_there
from tests.support.faults import Figure, Scale

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("services")]


async def test_killed_collectors_and_reward_services_resume_where_they_stopped(
    plane: ControlPlane, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    """A kill every 20 windows or so, then some windows without the service, then its next start."""
    num_kills, job, window = scale(3, 20), one_node_job(), 0
    await plane.bus.publish(job)
    for _ in range(num_kills):
        name, before, without = chance.choice(["collector", "reward"]), chance.randint(5, 15), chance.randint(3, 10)
        feeding = asyncio.create_task(feed_windows(plane, job, range(window, window + before)))
        await asyncio.sleep(0.04 * before * chance.random())  # the moment of the crash
        plane.services[name].kill()
        await feeding
        await feed_windows(plane, job, range(window + before, window + before + without))
        window += before + without
        await plane.start(name)
    await check_all_there(plane, job, window)
    figure("kills", num_kills)
    figure("windows", window)


async def test_replicas_of_collector_and_reward_give_each_output_once(
    plane: ControlPlane, scale: Scale, figure: Figure
) -> None:
    """Equal identities: the broker keeps one. Which of two collectors read the kernel is no matter."""
    half, job = scale(20, 150), one_node_job()
    await plane.bus.publish(job)
    seconds = [plane.another(name, {"DYNAMIX_INSTANCE": f"second-{name}"}) for name in ("collector", "reward")]
    async with watching(plane.bus, job.job) as watch:
        for second in seconds:
            second.start()
        try:
            await watch.until(lambda: bool(watch.counter("second-collector", "ready", "collector")))
            await watch.until(lambda: bool(watch.counter("second-reward", "ready", "reward")))
            await feed_windows(plane, job, range(half))
            for name in ("collector", "reward"):
                plane.services[name].kill()
            await feed_windows(plane, job, range(half, 2 * half))
            await check_all_there(plane, job, 2 * half)
            assert all(second.exit_code() is None for second in seconds)
        finally:
            for second in seconds:
                second.stop()
    figure("windows", 2 * half)
