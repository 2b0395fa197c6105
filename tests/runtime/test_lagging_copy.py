"""Three real servers of which one lacks what a stream stores: a reader that it answers reads later, and all of it."""

import asyncio
import contextlib

from tests.support.brokers import connected, publish_states
from tests.support.lagging_copy import LaggingCopy
from tests.support.reading import STATES, numbers, read

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.schemas.streams import FEED


async def test_a_reader_at_a_server_whose_copy_lags_reads_everything_in_order() -> None:
    async with LaggingCopy() as servers, contextlib.AsyncExitStack() as stack:
        writer: Bus = await stack.enter_async_context(connected(servers.settings))
        await provision(writer, [FEED], num_replicas=3)
        await servers.until_current(writer, [FEED])
        leader = (await servers.leader_of(writer, FEED.name)).name
        behind = next(name for name in servers.servers if name != leader)
        there = await stack.enter_async_context(connected(servers.servers[behind].settings))
        await publish_states(writer, range(1))
        async with there.consume(FEED.name, STATES, start="all") as reader:
            assert numbers(await read(reader, 1)) == [0]
            await servers.keep_behind(writer, FEED.name, behind)
            await publish_states(writer, range(1, 6))
            found = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3.0):
                    while len(found) < 5:
                        found += numbers(await anext(reader))
            assert found == list(range(1, 1 + len(found)))
            servers.let_catch_up()
            while len(found) < 5:
                found += numbers(await read(reader, 1))
            assert found == [1, 2, 3, 4, 5]
        assert there.counters["consumer_resets"] == 0
        await servers.until_current(writer, [FEED])
