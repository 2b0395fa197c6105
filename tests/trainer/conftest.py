"""For tests of the trainer."""

from collections.abc import Iterator

import pytest
import torch
from tests.support.sockets import Pair, connected


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small matrices gain nothing from a second thread, and waiting for one costs a busy machine a factor of ten."""
    torch.set_num_threads(1)


@pytest.fixture
def connection() -> Iterator[Pair]:
    with connected() as pair:
        yield pair
