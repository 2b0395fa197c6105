"""For every test."""

import logging
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog
from tests.support.brokers import ConfiguredServer, connected

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision

hypothesis.settings.register_profile("tests", deadline=None)  # a busy machine is no failure of a property
hypothesis.settings.load_profile("tests")

pytest_plugins = ["tests.support.bpf", "tests.support.extensions", "tests.support.faults"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that at the end no process works alone."""
    items.sort(key=_most_seconds, reverse=True)


def _most_seconds(item: pytest.Item) -> float:
    """What a slow test may take; 0 for all others."""
    if item.get_closest_marker("slow") is None:
        return 0.0
    limit = item.get_closest_marker("timeout")
    return float(limit.args[0]) if limit else 300.0


DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


@pytest.fixture(scope="session", autouse=True)
def _heeds_interrupts() -> None:
    """Under `nohup make test &` the tests would ignore SIGINT, and what they start inherits that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _dev_as_it_was() -> Iterator[None]:
    """Check /dev: as root a test could replace a device by a file, for everybody on the machine."""
    before = _devices()
    yield
    assert _devices() == before, "a test has changed /dev"


def _devices() -> dict[str, tuple[int, int]]:
    """The devices that every machine has, and regular files that have no business there: type and device number."""
    found = {path.name: path.lstat() for path in Path("/dev").iterdir()}
    return {
        name: (stat.S_IFMT(status.st_mode), status.st_rdev)
        for name, status in found.items()
        if name in DEVICES or stat.S_ISREG(status.st_mode)
    }


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
