"""FEED is full: decisions are stored, metric windows are dropped first, and all services resume."""

import os
import signal

import pytest
from tests.support.bus_watch import watching
from tests.support.control_plane import NODE, ControlPlane, one_node_job, report_of
from tests.support.decision_checks import check_decisions, recorded_states
from tests.support.faults import Figure, Scale

from dynamix.runtime.bus.provision import provision
from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("services")]

SIZES = (128,) * 4
SPEEDS = (3000.0, 3000.0, 2000.0, 1000.0)


async def fill(plane: ControlPlane) -> None:
    """Let FEED refuse everything that comes, as it does where nothing may be discarded."""
    config = await plane.bus.requests.stream_config(FEED.name)
    full = (await plane.bus.stream_state(FEED.name)).num_bytes
    await plane.bus.requests.write_stream("UPDATE", {**config, "discard": "new", "max_bytes": full})


async def test_a_full_feed_drops_windows_first_and_stores_every_decision(
    plane: ControlPlane, scale: Scale, figure: Figure
) -> None:
    """The window of a report is dropped, its state waits until there is room."""
    job, rounds, num_windows = one_node_job(), scale(2, 10), 0
    await plane.bus.publish(job)
    async with watching(plane.bus, job.job) as watch:
        for shed in range(rounds):
            os.kill(plane.services["arbitrator"].pid, signal.SIGSTOP)
            num_windows += 5
            for window in range(num_windows - 5, num_windows):
                await plane.bus.publish(report_of(job, window, SIZES, SPEEDS))
            await plane.wait_for(FEED.name, subjects.of("reward", job.job, "*"), num_windows - shed)
            await fill(plane)
            await plane.bus.publish(report_of(job, num_windows, SIZES, SPEEDS))
            await watch.until(lambda num=shed + 1: watch.counter(NODE, "windows_shed", "collector") == num)
            os.kill(plane.services["arbitrator"].pid, signal.SIGCONT)
            await watch.until_decided(num_windows)
            await provision(plane.bus)
            num_windows += 1
            await watch.until_decided(num_windows)
        rewards = await plane.wait_for(FEED.name, subjects.of("reward", job.job, "*"), num_windows - rounds)
        assert len(rewards) == num_windows - rounds
        assert all(service.exit_code() is None for service in plane.services.values())
    await check_decisions(plane.bus, job, num_windows=num_windows)
    states = {state.window for _, state in await recorded_states(plane.bus, job)}
    assert states == set(range(num_windows))
    figure("windows_shed", num_windows - len(rewards))
    figure("states_missing", num_windows - len(states))
