"""The real services against the deployed broker: each with its own user's rights, one window goes all the way round."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import pytest
from tests.support.control_plane import NODE, one_node_job, report_of
from tests.support.deployed_broker import INSTANCE, DeployedBroker

from dynamix.cli.commands.doctor.bus import HOW_TO_LOOK, is_alive
from dynamix.cli.commands.doctor.bus import bus as bus_checks
from dynamix.cli.commands.top import stored
from dynamix.cli.services import SERVICES, ServiceProcess, bus_environment, wait_until_ready
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Live, Reward
from dynamix.schemas.streams import ACTIONS, FEED

M = TypeVar("M", Action, Reward)


def environment(service: str) -> dict[str, str]:
    """Of a service: a reward service's key is for its instance."""
    return {"DYNAMIX_NODE": NODE} | ({"DYNAMIX_INSTANCE": INSTANCE} if service == "reward" else {})


@pytest.fixture
async def watcher(broker: DeployedBroker) -> AsyncIterator[Bus]:
    """The services run, each with its own key; the bus is the watcher's."""
    async with running(broker, SERVICES) as bus:
        yield bus


@contextlib.asynccontextmanager
async def running(broker: DeployedBroker, names: Sequence[str]) -> AsyncIterator[Bus]:
    services = [ServiceProcess(name, {**bus_environment(broker.settings(name)), **environment(name)}) for name in names]
    bus = await Bus.connect(broker.settings("watcher"), name="watcher-1")
    try:
        for service in services:
            service.start()
        await wait_until_ready(bus, names)
        yield bus
    finally:
        for service in services:
            service.stop()
        await bus.close()


async def test_a_report_becomes_a_window_and_a_reward_with_keys_that_make_nothing(broker: DeployedBroker) -> None:
    trainer = await Bus.connect(broker.settings("trainer"), name="trainer-1")
    job = one_node_job()
    try:
        async with running(broker, ("collector", "reward")) as watcher:
            await trainer.publish(job)
            await trainer.publish(report_of(job, 0, job.initial_local_batch_sizes, (1000.0, 1000.0, 1000.0, 300.0)))
            async with asyncio.timeout(20):
                while (stored := await watcher.last(FEED.name, subjects.of("reward", job.job, NODE))) is None:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.05)
    finally:
        await trainer.close()
    assert [rank.rank for rank in decode(Reward, stored.subject, stored.payload).ranks] == [0, 1, 2, 3]
    assert trainer.counters["permission_denials"] == 0


async def test_a_window_passes_all_services_without_a_denied_permission(broker: DeployedBroker, watcher: Bus) -> None:
    trainer = await Bus.connect(broker.settings("trainer"), name="trainer-1")
    job = one_node_job()
    try:
        await trainer.publish(job)
        await trainer.publish(report_of(job, 0, job.initial_local_batch_sizes, (1000.0, 1000.0, 1000.0, 300.0)))
        action = await first(watcher, ACTIONS.name, subjects.of("action", job.job), Action)
        heard = await trainer.newest(ACTIONS.name, subjects.of("action", job.job))
        reward = await first(watcher, FEED.name, subjects.of("reward", job.job, NODE), Reward)
    finally:
        await trainer.close()
    assert (action.generation, action.window) == (0, 0)
    assert heard is not None
    assert decode(Action, heard.subject, heard.payload) == action
    assert sum(action.local_batch_sizes) == sum(job.initial_local_batch_sizes)
    assert action.local_batch_sizes[3] < action.local_batch_sizes[0]
    assert [rank.rank for rank in reward.ranks] == [0, 1, 2, 3]
    assert await denials(watcher) == dict.fromkeys(SERVICES, 0)
    assert trainer.counters["permission_denials"] == 0

    view, _, _ = await stored(watcher, None)
    assert view is not None
    assert (view.name, view.window, len(view.ranks)) == (job.job, 0, 4)
    checks = await bus_checks(broker.settings("watcher"), configured=True)
    assert {check.name: check.present for check in checks} == {"broker": True, "streams": True, "services": True}
    assert watcher.counters["permission_denials"] == 0
    unseen = await bus_checks(broker.settings("trainer"), configured=True)
    forbidden = {check.name: check.fix for check in unseen if not check.permitted}
    assert forbidden == dict.fromkeys(("streams", "services"), HOW_TO_LOOK)
    assert not any(check.is_missing for check in unseen)
    asked = [is_alive(broker.settings(name), name, environment(name)) for name in SERVICES]  # as each service itself
    assert all(await asyncio.gather(*asked))


async def first(bus: Bus, stream: str, subject: str, kind: type[M]) -> M:
    async with asyncio.timeout(20), bus.consume(stream, [subject], start="all") as consumer:
        async for batch in consumer:
            return decode(kind, batch[0].subject, batch[0].payload)
    raise AssertionError("the consumer ended")


async def denials(bus: Bus) -> dict[str, int]:
    """What each service's next heartbeat says of permissions it was denied."""
    found: dict[str, int] = {}
    async with asyncio.timeout(10), bus.subscribe(subjects.of("live", "*", "*")) as beats:
        async for message in beats:
            beat = decode(Live, message.subject, message.payload)
            found[beat.service] = beat.counters["bus_permission_denials"]
            if set(found) == set(SERVICES):
                return found
    raise AssertionError("the subscription ended")
