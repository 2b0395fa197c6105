"""What services may say of themselves, tried on the real server: heartbeats, each for itself only."""

from typing import Any

import pytest

from dynamix.schemas import subjects
from dynamix.schemas.kinds import SERVICES
from dynamix.schemas.messages import Live


@pytest.mark.parametrize("user", SERVICES)
async def test_a_service_beats_for_itself_only_and_the_watcher_hears_it(connect: Any, user: str) -> None:
    watcher, bus = await connect("watcher"), await connect(user)
    async with watcher.subscribe(subjects.of("live", "*", "*")) as beats:
        await watcher._connection.round_trip(5.0)
        for service in (other for other in SERVICES if other != user):
            await bus.publish_live(Live(service=service, instance="forged", uptime_s=1.0))
        await bus.publish_live(Live(service=user, instance="real", uptime_s=1.0))
        assert (await anext(beats)).subject == subjects.of("live", user, "real")
    await bus._connection.round_trip(5.0)  # the denials come before the answer
    assert bus.counters["permission_denials"] == len(SERVICES) - 1


@pytest.mark.parametrize("user", ["collector", "reward", "arbitrator"])
async def test_a_service_hears_its_own_heartbeat_for_the_health_check(connect: Any, user: str) -> None:
    bus = await connect(user)
    async with bus.subscribe(subjects.of("live", user, "1")) as beats:
        await bus.publish_live(Live(service=user, instance="1", uptime_s=1.0))
        assert (await anext(beats)).subject == subjects.of("live", user, "1")
