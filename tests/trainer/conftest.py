"""A real broker with our streams."""

from collections.abc import AsyncIterator

import pytest
from tests.support.brokers import ConfiguredServer, connected

from dynamix.runtime.bus import Bus
from dynamix.runtime.provision import provision


@pytest.fixture
async def server() -> AsyncIterator[ConfiguredServer]:
    async with ConfiguredServer() as running:
        yield running


@pytest.fixture
async def bus(server: ConfiguredServer) -> AsyncIterator[Bus]:
    async with connected(server.settings) as connection:
        await provision(connection)
        yield connection
