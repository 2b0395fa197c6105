"""For every test."""

import logging
from collections.abc import AsyncIterator, Iterator

import pytest
import structlog
from tests.support.brokers import ConfiguredServer, connected

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision

pytest_plugins = ["tests.support.bpf", "tests.support.extensions", "tests.support.faults"]


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands and services set up logging for their process; here that process is shared."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
async def server() -> AsyncIterator[ConfiguredServer]:
    """A real broker of its own for each test: one starts in 40 ms."""
    async with ConfiguredServer() as running:
        yield running


@pytest.fixture
async def bus(server: ConfiguredServer) -> AsyncIterator[Bus]:
    """Connected to it, with our streams."""
    async with connected(server.settings) as connection:
        await provision(connection)
        yield connection
