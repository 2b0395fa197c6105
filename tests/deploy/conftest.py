"""One broker for all tests of a module: nothing that a test is refused can disturb another."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deployed_broker import DeployedBroker, deployed_broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedBroker]:
    directory: Path = tmp_path_factory.mktemp("broker")
    with deployed_broker(directory) as running:
        yield running
