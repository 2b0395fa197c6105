"""`/livez` and `/readyz` of every service, as a probe asks a process: ready, without a broker, and ready again."""

import asyncio

import pytest
from tests.support.control_plane import control_plane
from tests.support.http_get import free_port, get

from dynamix.cli.services import SERVICES, wait_until_ready

pytestmark = pytest.mark.timeout(120)


async def answers(port: int, path: str, status: int) -> str:
    """Wait until a path is answered so; the text."""
    async with asyncio.timeout(60):
        while True:
            found, text = await get(port, path)
            if found == status:
                return text
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("module", [*SERVICES, "arbitrator.learning"])
async def test_a_service_is_alive_without_a_broker_and_ready_only_with_one(module: str) -> None:
    port = free_port()
    async with control_plane() as plane:
        service = plane.another(module, {"DYNAMIX_METRICS_PORT": str(port)})
        plane.services[module] = service
        service.start()
        await wait_until_ready(plane.bus, ["learner" if module == "arbitrator.learning" else module])
        assert await answers(port, "/readyz", 200) == "ok\n"
        await plane.server.kill()
        assert "broker" in await answers(port, "/readyz", 503)
        assert await get(port, "/livez") == (200, "ok\n")
        await plane.server.restart()
        assert await answers(port, "/readyz", 200) == "ok\n"
        assert service.exit_code() is None
