"""A broker with the deployed configuration, one for all tests of a module."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deployed_broker import DeployedBroker, deployed_broker

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedBroker]:
    """One for a module, with its streams: nothing that a test is refused can disturb another."""
    directory: Path = tmp_path_factory.mktemp("broker")
    with deployed_broker(directory) as running:
        asyncio.run(_provision(running))
        assert running.keys("refresh") == 0
        yield running


async def _provision(broker: DeployedBroker) -> None:
    bus = await Bus.connect(broker.settings("provision"), name="test-1")
    await provision(bus)
    await bus.close()
