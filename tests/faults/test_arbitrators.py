"""Several arbitrators without a lease: kill -9, SIGSTOP, standby; compare-and-set decides between them."""

import asyncio
import functools
import itertools
import random

import pytest
from tests.support.arbitrators import Feeding, crew, feed_states, two_node_job
from tests.support.bus_watch import watching
from tests.support.control_plane import ControlPlane
from tests.support.decision_checks import check_decisions
from tests.support.faults import Figure, Scale

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_each_window_is_decided_once_over_thirty_kills(
    plane: ControlPlane, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    rounds, job, num_kills = scale(4, 30), two_node_job(), 0
    await plane.bus.publish(job)
    async with watching(plane.bus, job.job) as watch, crew(plane) as arbitrators:
        await watch.until_ready(arbitrators.start(), arbitrators.start())
        for begin in range(0, 10 * rounds, 10):
            feeding = asyncio.create_task(feed_states(plane, range(begin, begin + 10)))
            await watch.until_decided(begin + chance.randint(1, 9))
            for victim in chance.sample(sorted(arbitrators.members), chance.choice([1, 1, 2])):
                arbitrators.kill(victim)
                arbitrators.start()
                num_kills += 1
            await feeding
        await watch.until_decided(10 * rounds)
    actions = await check_decisions(plane.bus, job, num_windows=10 * rounds)
    figure("kills", num_kills)
    figure("decided_exactly_once", f"{len({action.window for action in actions})}/{10 * rounds}")
    waits_s = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(watch.actions)]
    figure("longest_without_decision_s", round(max(waits_s), 3))  # both may be dead, and a start takes a second


async def test_a_continued_arbitrator_writes_nothing_stale(
    plane: ControlPlane, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    """SIGSTOP in mid-stream until the other has decided on; the broker refuses what it wakes up with."""
    num_stops, job = scale(2, 10), two_node_job()
    await plane.bus.publish(job)
    async with watching(plane.bus, job.job) as watch, crew(plane) as arbitrators:
        names = [arbitrators.start(), arbitrators.start()]
        await watch.until_ready(*names)
        feeding = Feeding(functools.partial(feed_states, plane))
        for _ in range(num_stops):
            zombie = chance.choice(names)
            await watch.until_decided(len(watch.actions) + chance.randint(5, 15))
            arbitrators.stop(zombie)
            await watch.until_decided(len(watch.actions) + chance.randint(20, 60))
            adopted = watch.counter(zombie, "adopted")
            arbitrators.go_on(zombie)
            await watch.until(lambda name=zombie, before=adopted: watch.counter(name, "adopted") > before)
        num_windows = await feeding.finish()
        await watch.until_decided(num_windows)
        assert arbitrators.all_alive()
        refused = sum(watch.counter(name, "adopted") for name in names)
    await check_decisions(plane.bus, job, num_windows=num_windows)
    figure("stops", num_stops)
    figure("writes_refused", refused)
