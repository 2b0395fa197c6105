"""A broker with the deployed configuration, one for all tests of a module."""

from collections.abc import Iterator

import pytest
from tests.support.deployed_broker import DeployedBroker, become, deployed_broker

from dynamix.cli.main import main


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedBroker]:
    """One for a module, with its streams: nothing that a test is refused can disturb another."""
    with deployed_broker(tmp_path_factory.mktemp("broker")) as running:
        with pytest.MonkeyPatch.context() as patch:
            become(patch, running, "provision")
            assert main(["provision"]) == 0
        assert running.keys("refresh") == 0
        yield running
