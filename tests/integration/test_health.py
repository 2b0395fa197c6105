"""`/livez` and `/readyz` of every service, as a probe asks a process: ready, without a broker, and ready again."""

import asyncio

import pytest
from tests.support.control_plane import control_plane
from tests.support.http_get import free_port, get

from dynamix.cli.services import SERVICES, wait_until_ready

pytestmark = pytest.mark.timeout(300)


async def answers(port: int, path: str, status: int) -> str:
    """Wait until a path is answered so; the text."""
    async with asyncio.timeout(60):
        while True:
            found, text = await get(port, path)
            if found == status:
                return text
            await asyncio.sleep(0.1)


async def test_services_are_alive_without_a_broker_and_ready_only_with_one() -> None:
    modules = {module: free_port() for module in (*SERVICES, "arbitrator.learning")}
    async with control_plane() as plane:
        for module, port in modules.items():
            plane.services[module] = plane.another(module, {"DYNAMIX_METRICS_PORT": str(port)})
            plane.services[module].start()
        await wait_until_ready(plane.bus, [*SERVICES, "learner"], 180.0)
        for port in modules.values():
            assert await answers(port, "/readyz", 200) == "ok\n"
        await plane.server.kill()
        for port in modules.values():
            assert "broker" in await answers(port, "/readyz", 503)
            assert await get(port, "/livez") == (200, "ok\n")
        await plane.server.restart()
        for module, port in modules.items():
            assert await answers(port, "/readyz", 200) == "ok\n"
            assert plane.services[module].exit_code() is None
