"""A real Prometheus with our configuration and rules, asked over its API; and the queries of the Grafana dashboard."""

import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from .http_get import free_port, get

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml"
CONFIGURATION = RULES.with_name("prometheus.yml")
DASHBOARD = RULES.parents[1] / "grafana/dynamix.json"
DEPLOYED_PORTS = {"collector": 9601, "reward": 9602, "arbitrator": 9603}


def needs(program: str) -> pytest.MarkDecorator:
    """Skip where a program of Debian's package `prometheus` is missing; fail where CI has installed it."""
    missing = shutil.which(program) is None
    if missing and os.environ.get("REQUIRE_PROMETHEUS_TESTS") == "1":
        raise AssertionError(f"REQUIRE_PROMETHEUS_TESTS=1, and yet there is no {program}")
    return pytest.mark.skipif(missing, reason=f"{program} is missing (Debian: apt-get install prometheus)")


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


async def eventually(condition: Callable[[], Awaitable[object]], timeout_s: float = 120.0) -> None:
    """Wait for what is only seen by asking."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.2)


def grafana_queries(job: str = ".+") -> list[str]:
    """All queries of its panels, as Grafana sends them once a job (an expression) is chosen."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"].replace("$training_job", job) for panel in panels for target in panel.get("targets", ())]
