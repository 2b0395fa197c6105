"""What `nats micro` sees of a service, read with nats-py's own client of that protocol."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats
from tests.support.brokers import ConfiguredServer, connected, publish_states, publish_unstored, until

from dynamix.runtime.bus import Bus, Identity
from dynamix.runtime.bus.discovery import answer_to, subjects_of
from dynamix.runtime.bus.streams.statistics import StatisticsByKind
from dynamix.runtime.health.dead_letters import DeadLetters

ME = Identity(name="dynamix-collector", version="1.2.3", description="a test", metadata={"node": "node-a"})
OTHER = Identity(name="dynamix-reward", version="1.2.3", description="another", metadata={})
STATES = "dynamix.v1.state.*.*"


@contextlib.asynccontextmanager
async def answering(server: ConfiguredServer, *identities: Identity) -> AsyncIterator[list[Bus]]:
    """A bus for each, found by `nats micro`."""
    async with contextlib.AsyncExitStack() as stack:
        buses = [await stack.enter_async_context(connected(server.settings, name=one.name)) for one in identities]
        tasks = [asyncio.create_task(bus.answer_discovery(one)) for bus, one in zip(buses, identities, strict=True)]
        await asyncio.sleep(0)  # they have subscribed
        for bus in buses:
            await bus._connection.round_trip(5.0)
        yield buses
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def asking(server: ConfiguredServer) -> AsyncIterator[Client]:
    """A plain client of nats-py."""
    settings = server.settings
    client = await nats.connect(settings.url, user=settings.user, password=settings.password)
    try:
        yield client
    finally:
        await client.close()


async def ask(client: Client, subject: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await client.request(subject, timeout=5)).data)
    return found


@pytest.mark.parametrize("subject", subjects_of("PING", ME), ids=("all", "name", "id"))
async def test_a_service_answers_to_all_to_its_name_and_to_its_id(server: ConfiguredServer, subject: str) -> None:
    async with answering(server, ME), asking(server) as client:
        ping = ServicePing.from_dict(await ask(client, subject))
    assert (ping.name, ping.id, ping.version, ping.metadata) == (ME.name, ME.id, "1.2.3", {"node": "node-a"})


async def test_two_services_both_answer_to_all_and_one_to_its_name(server: ConfiguredServer) -> None:
    async with answering(server, ME, OTHER), asking(server) as client:
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        await client.publish("$SRV.PING", reply=inbox)
        names = {json.loads((await answers.next_msg(5)).data)["name"] for _ in range(2)}
        assert names == {ME.name, OTHER.name}
        assert (await ask(client, "$SRV.PING.dynamix-reward"))["id"] == OTHER.id
        with pytest.raises(nats.errors.NoRespondersError):
            await ask(client, "$SRV.PING.dynamix-arbitrator")


async def test_statistics_count_messages_dead_letters_and_the_time_that_they_took(
    server: ConfiguredServer, bus: Bus
) -> None:
    async with answering(server, ME) as (mine,), asking(server) as client:
        assert ServiceStats.from_dict(await ask(client, "$SRV.STATS")).endpoints == []
        await publish_states(bus, range(5))
        seen = 0
        async with mine.consume("FEED", [STATES], start="all") as consumer:
            async for batch in consumer:
                await DeadLetters(mine, "collector", {}).set_aside(batch[0], "cannot be used")
                await asyncio.sleep(0.01)
                seen += len(batch)
                if seen == 5:
                    break
        stats = ServiceStats.from_dict(await ask(client, f"$SRV.STATS.{ME.name}.{ME.id}"))
        info = ServiceInfo.from_dict(await ask(client, f"$SRV.INFO.{ME.name}"))
    (endpoint,) = stats.endpoints
    assert (endpoint.name, endpoint.subject, endpoint.num_requests) == ("state", "dynamix.v1.state.>", 5)
    assert endpoint.num_errors >= 1
    assert endpoint.last_error == "cannot be used"
    assert endpoint.processing_time >= 10_000_000
    assert endpoint.average_processing_time == endpoint.processing_time // 5
    assert [(one.name, one.metadata["stream"]) for one in info.endpoints] == [("state", "FEED")]
    assert info.description == "a test"


async def test_it_answers_again_after_the_broker_was_restarted(server: ConfiguredServer) -> None:
    async with answering(server, ME) as (mine,):
        await server.restart()
        await until(lambda: mine.counters["reconnects"])
        await mine._connection.round_trip(5.0)
        async with asking(server) as client:
            assert (await ask(client, "$SRV.PING"))["id"] == ME.id


async def test_a_discovery_request_cannot_name_another_reply_subject(server: ConfiguredServer, bus: Bus) -> None:
    """A question's reply subject is the asker's choice: an answer there would be stored as an action."""
    async with answering(server, ME), asking(server) as client:
        await client.publish("$SRV.PING", reply="dynamix.v1.action.job-1")
        await ask(client, "$SRV.PING")  # answered after the one before
        assert (await bus.stream_state("ACTIONS")).num_messages == 0


async def test_unknown_kinds_share_one_entry_of_the_statistics() -> None:
    statistics = StatisticsByKind()
    for subject in ("foreign.a", "foreign.b", "dynamix.v1.foreign.c", "dynamix.v1.state.a.b", "dynamix.v1.state.>"):
        statistics.of_subjects(subject).record_error("bad")
    statistics.of_subjects("dynamix.v1.state.>", "dynamix.v1.action.*").record_error("bad")
    stats = ServiceStats.from_dict(json.loads(json.dumps(answer_to("STATS", ME, statistics))))
    assert [(one.name, one.num_errors) for one in stats.endpoints] == [("other", 4), ("state", 2)]


async def test_a_service_without_discovery_permissions_still_works(caplog: pytest.LogCaptureFixture) -> None:
    server = ConfiguredServer(
        authorization='users: [{user: "a", password: "b", permissions: {publish: ">", subscribe: "_INBOX.>"}}]'
    )
    async with server, connected(server.user("a", "b")) as bus:
        task = asyncio.create_task(bus.answer_discovery(ME))
        await until(lambda: bus.counters["permission_denials"] == 9)
        assert not task.done()
        await publish_unstored(bus, "dynamix.v1.live.collector.a", b"")
        assert bus.is_connected
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert "`nats micro` will not find this service" in caplog.text
