"""For fault tests."""

from collections.abc import AsyncIterator

import pytest
from tests.support.control_plane import ControlPlane, control_plane


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    """A broker with its streams, without services."""
    async with control_plane() as running:
        yield running


@pytest.fixture
async def services(plane: ControlPlane) -> None:
    """Start the three services of the `plane`."""
    await plane.start("collector", "reward", "arbitrator")
