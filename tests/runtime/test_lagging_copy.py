"""Three real servers of which one lacks what a stream stores: a reader that it answers asks the stream's leader."""

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
            assert numbers(await read(reader, 5)) == [1, 2, 3, 4, 5]
            servers.let_catch_up()
            await publish_states(writer, range(6, 9))
            assert numbers(await read(reader, 3)) == [6, 7, 8]
        assert there.counters["consumer_resets"] == 0
        await servers.until_current(writer, [FEED])
