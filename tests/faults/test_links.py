"""Links that lose, delay or drop connections: a TCP proxy between the services and the broker."""

import functools
import random
from collections.abc import AsyncIterator

import pytest
from tests.support.arbitrators import Feeding, crew, feed_states, two_node_job
from tests.support.bus_watch import watching
from tests.support.control_plane import ControlPlane
from tests.support.decision_checks import check_decisions
from tests.support.faults import Figure, Scale
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
async def proxy(plane: ControlPlane) -> AsyncIterator[Proxy]:
    async with Proxy(plane.server.port) as running:
        yield running


async def test_an_arbitrator_behind_a_half_open_link_is_replaced_and_returns(
    plane: ControlPlane, proxy: Proxy, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    """The full run waits until pings find it out (4 to 6 s); in the quick one a reset comes with the heal."""
    job = two_node_job()
    await plane.bus.publish(job)
    async with watching(plane.bus, job.job) as watch, crew(plane) as arbitrators:
        behind = arbitrators.start({"DYNAMIX_NATS_URL": proxy.url})
        await watch.until_ready(behind, arbitrators.start())
        feeding = Feeding(functools.partial(feed_states, plane))
        for _ in range(scale(1, 2)):
            await watch.until_decided(len(watch.actions) + chance.randint(5, 15))
            proxy.half_open()
            await watch.until_decided(len(watch.actions) + 20)
            proxy.heal()
            if not scale.is_full:
                proxy.cut()
            reconnects = watch.counter(behind, "bus_reconnects")
            await watch.until(lambda before=reconnects: watch.counter(behind, "bus_reconnects") > before)
        await watch.until(lambda: watch.counter(behind, "adopted") > 0)  # it tried, and was refused
        num_windows = await feeding.finish()
        await watch.until_decided(num_windows)
        assert arbitrators.all_alive()
        figure("writes_refused", sum(watch.counter(name, "adopted") for name in arbitrators.members))
    await check_decisions(plane.bus, job, num_windows=num_windows)
    assert proxy.num_bytes_lost > 0


async def test_actions_with_lost_acknowledgements_are_not_written_twice(
    plane: ControlPlane, proxy: Proxy, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    """The one arbitrator hears nothing of what it wrote, then loses the line; it must not think its action failed."""
    rounds, job = scale(3, 20), two_node_job()
    await plane.bus.publish(job)
    async with watching(plane.bus, job.job) as watch, crew(plane) as arbitrators:
        await watch.until_ready(arbitrators.start({"DYNAMIX_NATS_URL": proxy.url}))
        for begin in range(0, 10 * rounds, 10):
            proxy.losing_answers = False
            await feed_states(plane, range(begin, begin + chance.randint(1, 9)))
            proxy.losing_answers = True
            await feed_states(plane, range(begin, begin + 10))  # the first ones again: the broker knows them
            proxy.losing_answers = False
            proxy.cut()
            await watch.until_decided(begin + 10)
        assert arbitrators.all_alive()
    await check_decisions(plane.bus, job, num_windows=10 * rounds)
    figure("bytes_lost", proxy.num_bytes_lost)
