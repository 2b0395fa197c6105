"""A broker with the deployed configuration, one for all tests of a module, and services that are scraped."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.brokers import ConfiguredServer
from tests.support.deployed_broker import DeployedBroker, deployed_broker
from tests.support.scraped_plane import ScrapedPlane
from tests.support.services_here import services_here

from dynamix.runtime.bus import Bus


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedBroker]:
    """One for a module: nothing that a test is refused can disturb another."""
    directory: Path = tmp_path_factory.mktemp("broker")
    with deployed_broker(directory) as running:
        yield running


@pytest.fixture
async def plane(server: ConfiguredServer, bus: Bus) -> AsyncIterator[ScrapedPlane]:
    async with services_here(bus, "collector", "reward", "arbitrator") as services:
        yield ScrapedPlane(server, bus, services)
