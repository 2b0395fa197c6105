"""What services may say of themselves, tried on the real server: heartbeats and discovery, each for itself only."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.deployed_broker import USERS

from dynamix.runtime.bus import Bus, Identity, PermissionDeniedError
from dynamix.runtime.bus.discovery import VERBS, subjects_of
from dynamix.schemas import subjects
from dynamix.schemas.kinds import SERVICES
from dynamix.schemas.messages import Live

DISCOVERABLE = ("collector", "reward", "arbitrator", "learner")


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


@pytest.mark.parametrize("user", DISCOVERABLE)
async def test_a_service_is_found_by_the_watcher_with_its_statistics(connect: Any, user: str) -> None:
    watcher, bus = await connect("watcher"), await connect(user)
    async with found_by_micro(bus, user) as identity:
        for subject in (question for verb in VERBS for question in subjects_of(verb, identity)):
            assert (await ask(watcher, subject))["id"] == identity.id
    assert bus.counters["permission_denials"] == 0


@pytest.mark.parametrize("user", [user for user in USERS if user != "watcher"])
async def test_only_the_watcher_sends_discovery_requests(connect: Any, user: str) -> None:
    bus = await connect(user)
    await bus._connection.send("$SRV.PING", b"", f"{bus._connection.inbox}.x")
    await bus._connection.round_trip(5.0)
    assert bus.counters["permission_denials"] == 1


@pytest.mark.parametrize("user", SERVICES)
async def test_a_service_does_not_answer_for_another(connect: Any, user: str) -> None:
    bus = await connect(user)
    for other in (service for service in SERVICES if service != user):
        with pytest.raises(PermissionDeniedError):
            async with bus.subscribe(f"$SRV.PING.dynamix-{other}") as questions:
                await anext(questions)
    with pytest.raises(PermissionDeniedError):
        async with bus.subscribe("$SRV.>") as questions:
            await anext(questions)


@pytest.mark.parametrize("user", DISCOVERABLE)
async def test_an_answer_goes_to_the_watchers_inbox_only(connect: Any, user: str) -> None:
    bus = await connect(user)
    targets = [f"_INBOX.{other}.x" for other in USERS if other not in {"watcher", user}]
    for target in targets:
        await bus._connection.send(target, b"")
    await bus._connection.round_trip(5.0)
    assert bus.counters["permission_denials"] == len(targets)


@contextlib.asynccontextmanager
async def found_by_micro(bus: Bus, service: str) -> AsyncIterator[Identity]:
    identity = Identity(name=f"dynamix-{service}", version="1.2.3", description="a test", metadata={})
    task = asyncio.create_task(bus.answer_discovery(identity))
    await asyncio.sleep(0)  # it has subscribed
    await bus._connection.round_trip(5.0)
    yield identity
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def ask(bus: Bus, subject: str) -> dict[str, Any]:
    inbox = f"{bus._connection.inbox}.micro"
    async with asyncio.timeout(10), bus.subscribe(inbox) as answers:
        await bus._connection.send(subject, b"", inbox)
        found: dict[str, Any] = json.loads((await anext(answers)).payload)
        return found
