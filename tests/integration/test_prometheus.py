"""A real Prometheus scrapes the services of a running job, reads all rules, raises an alert and clears it."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.support.alert_trials import RULES, needs
from tests.support.control_plane import ControlPlane, control_plane, feed_windows, one_node_job
from tests.support.http_get import free_port, get

from dynamix.cli.services import SERVICES, ServiceProcess, wait_until_ready

CONFIGURATION = RULES.with_name("prometheus.yml")
DEPLOYED_PORTS = {"collector": 9601, "reward": 9602, "arbitrator": 9603}

pytestmark = [needs("prometheus"), pytest.mark.slow, pytest.mark.timeout(180)]


class Prometheus:
    """A running Prometheus, asked over its API."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def ask(self, path: str) -> Any:
        status, body = await get(self._port, f"/api/v1/{path}")
        assert status == 200, body
        return json.loads(body)["data"]

    async def values(self, query: str) -> list[float]:
        """The values of a query now."""
        return [float(series["value"][1]) for series in (await self.ask(f"query?query={quote(query)}"))["result"]]


@contextlib.asynccontextmanager
async def prometheus(directory: Path, ports: dict[str, int]) -> AsyncIterator[Prometheus]:
    """Our configuration and our rules, every second and without their waits."""
    configuration = CONFIGURATION.read_text().replace("15s", "1s")
    for service, port in ports.items():
        configuration = configuration.replace(f":{DEPLOYED_PORTS[service]}", f":{port}")
    (directory / "prometheus.yml").write_text(configuration)
    (directory / RULES.name).write_text(re.sub(r"^ +for: .*\n", "", RULES.read_text(), flags=re.MULTILINE))
    port = free_port()
    with (directory / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
    try:
        await eventually(lambda: _is_ready(port))
        yield Prometheus(port)
    finally:
        process.terminate()
        await process.wait()


async def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError):
        return (await get(port, "/-/ready"))[0] == 200
    return False


async def eventually(condition: Callable[[], Awaitable[object]], timeout_s: float = 60.0) -> None:
    """Wait for what is only seen by asking."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.2)


async def started(plane: ControlPlane, ports: dict[str, int]) -> dict[str, ServiceProcess]:
    services = {name: plane.another(name, {"DYNAMIX_METRICS_PORT": str(port)}) for name, port in ports.items()}
    for service in services.values():
        service.start()
    plane.services |= services
    await wait_until_ready(plane.bus, services)
    return services


async def test_it_scrapes_a_running_job_and_raises_an_alert_for_a_dead_service_until_it_is_back(tmp_path: Path) -> None:
    ports = {name: free_port() for name in SERVICES}
    async with control_plane() as plane, prometheus(tmp_path, ports) as server:
        services = await started(plane, ports)
        job = one_node_job()
        await plane.bus.publish(job)
        await feed_windows(plane, job, range(5))

        async def shows(query: str, *values: float) -> bool:
            return await server.values(query) == list(values)

        await eventually(lambda: shows("sum(up)", 3))
        await eventually(lambda: shows(f'dynamix_job_decided_window{{training_job="{job.job}"}}', 4))
        await eventually(lambda: shows("sum(dynamix_job_global_batch_size)", 512))
        await eventually(lambda: shows("sum(dynamix_rank_local_batch_size)", 512))
        await eventually(lambda: shows("count(dynamix_reward)", 1))
        await eventually(lambda: shows("sum(dynamix_ready * dynamix_connected)", 3))
        await eventually(lambda: shows("sum(dynamix_rewards_total)", 5))

        down = 'count(ALERTS{alertname="DynamixServiceDown",alertstate="firing"})'
        assert await shows(down)
        services["reward"].kill()
        await eventually(lambda: shows(down, 1))
        await started(plane, {"reward": ports["reward"]})
        await eventually(lambda: shows(down))

        groups = (await server.ask("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) > 15
        assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
