"""kill -9 of services and broker while a job reports: nothing is decided twice, nothing acknowledged is lost."""

import asyncio
import itertools
import os
import signal

import pytest
from tests.support.control_plane import (
    ControlPlane,
    control_plane,
    feed_windows,
    one_node_job,
    reference_actions,
)

from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED

pytestmark = pytest.mark.slow
NUM_WINDOWS = 80


async def check_each_window_decided_once(plane: ControlPlane, policy: str = "proportional") -> None:
    """The stored actions are, byte for byte, those of one undisturbed fold over what FEED recorded."""
    actions = await plane.wait_for_actions(NUM_WINDOWS)
    assert [action.window for action in actions] == list(range(NUM_WINDOWS))
    assert actions == await reference_actions(plane, one_node_job(policy=policy))
    assert all(new.previous_hash == old.hash for old, new in itertools.pairwise(actions))


async def test_a_killed_arbitrator_never_decides_a_window_twice() -> None:
    async with control_plane("collector", "arbitrator") as plane:
        job = one_node_job()
        await plane.bus.publish(job)
        feeding = asyncio.create_task(feed_windows(plane, job, range(NUM_WINDOWS)))
        for done in (5, 25, 45):
            await plane.wait_for_actions(done)
            plane.services["arbitrator"].kill()
            await plane.start("arbitrator")
        await feeding
        await check_each_window_decided_once(plane)


async def test_two_arbitrators_decide_each_window_once_and_one_survives_the_other() -> None:
    async with control_plane("collector", "arbitrator") as plane:
        job = one_node_job(policy="random")
        second = plane.another("arbitrator", {"DYNAMIX_INSTANCE": "second"})
        second.start()
        try:
            await plane.bus.publish(job)
            feeding = asyncio.create_task(feed_windows(plane, job, range(NUM_WINDOWS)))
            await plane.wait_for_actions(NUM_WINDOWS // 2)
            plane.services["arbitrator"].kill()
            await feeding
            await check_each_window_decided_once(plane, "random")
        finally:
            second.stop()


async def test_an_arbitrator_that_was_stopped_and_goes_on_is_refused_by_the_broker_and_catches_up() -> None:
    async with control_plane("collector", "arbitrator") as plane:
        job = one_node_job()
        await plane.bus.publish(job)
        feeding = asyncio.create_task(feed_windows(plane, job, range(NUM_WINDOWS)))
        await plane.wait_for_actions(10)
        zombie = plane.services["arbitrator"]
        os.kill(zombie.pid, signal.SIGSTOP)
        second = plane.another("arbitrator", {"DYNAMIX_INSTANCE": "second"})
        second.start()
        try:
            await plane.wait_for_actions(40)
            os.kill(zombie.pid, signal.SIGCONT)
            await feeding
            await plane.wait_for_actions(NUM_WINDOWS)
            second.kill()
            await feed_windows(plane, job, range(NUM_WINDOWS, NUM_WINDOWS + 5))
            assert [action.window for action in await plane.wait_for_actions(NUM_WINDOWS + 5)] == list(
                range(NUM_WINDOWS + 5)
            )
            assert await plane.actions() == await reference_actions(plane, job)
        finally:
            second.stop()


async def test_killed_collector_and_reward_go_on_where_they_were() -> None:
    async with control_plane("collector", "reward", "arbitrator") as plane:
        job = one_node_job()
        await plane.bus.publish(job)
        feeding = asyncio.create_task(feed_windows(plane, job, range(NUM_WINDOWS)))
        for name in ("collector", "reward"):
            await plane.wait_for_actions(10)
            plane.services[name].kill()
            await asyncio.sleep(0.3)  # windows pass meanwhile: the outage itself
            await plane.start(name)
        await feeding
        await check_each_window_decided_once(plane)
        for kind in (subjects.window(job.job, "*"), subjects.state(job.job, "*"), subjects.reward(job.job, "*")):
            messages = await plane.wait_for(FEED.name, kind, NUM_WINDOWS)
            assert sorted(message.window for message in messages) == list(range(NUM_WINDOWS))  # type: ignore[attr-defined]


async def test_a_killed_broker_comes_back_and_nothing_acknowledged_is_missing() -> None:
    async with control_plane("collector", "reward", "arbitrator") as plane:
        job = one_node_job()
        await plane.bus.publish(job)
        feeding = asyncio.create_task(feed_windows(plane, job, range(NUM_WINDOWS)))
        for done in (10, 40):
            await plane.wait_for_actions(done)
            await plane.server.kill()
            await asyncio.sleep(0.5)  # the outage itself
            await plane.server.start()
        await feeding
        await check_each_window_decided_once(plane)
        rewards = await plane.wait_for(FEED.name, subjects.reward(job.job, "*"), NUM_WINDOWS)
        assert sorted(message.window for message in rewards) == list(range(NUM_WINDOWS))  # type: ignore[attr-defined]
        assert all(service.exit_code() is None for service in plane.services.values())
