"""`dynamix up` as a real process: it starts, prints how to use it, restarts what ends, and leaves nothing behind."""

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.http_get import free_ports_in_a_row, get

from dynamix.cli.commands.up import exited
from dynamix.cli.connection import find, path
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Live

SERVICES = {"collector", "reward", "arbitrator"}


class Up:
    """A running `dynamix up` and what it has said so far."""

    def __init__(self, process: asyncio.subprocess.Process, environ: dict[str, str]) -> None:
        self.process = process
        self.environ = environ
        self.said = ""

    async def says(self, pattern: str) -> re.Match[str]:
        """Wait until a line matches."""
        async with asyncio.timeout(30):
            while (match := re.search(pattern, self.said, re.MULTILINE)) is None:
                line = await self.process.stderr.readline()
                assert line, f"it ended; it had said:\n{self.said}"
                self.said += line.decode()
        return match

    async def pids(self) -> dict[str, int]:
        """The processes it has started, once all are ready."""
        found = {name: int((await self.says(rf"^{name} +ready as process (\d+)$"))[1]) for name in SERVICES}
        return {"broker": int((await self.says(r"^broker .* as process (\d+),"))[1]), **found}

    async def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        async with asyncio.timeout(30):
            return await self.process.wait()


async def start(environ: dict[str, str], *arguments: str) -> Up:
    command = [sys.executable, "-m", "dynamix.cli.main", "up", *arguments]
    return Up(await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.PIPE), environ)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DYNAMIX_", "XDG_"))}
    return {**kept, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}


@pytest.fixture
async def up(environ: dict[str, str]) -> AsyncIterator[Up]:
    running = await start(environ)
    yield running
    if running.process.returncode is None:
        await running.end(signal.SIGKILL)


async def beating(bus: Bus, service: str, uptime_below_s: float) -> None:
    """Wait for a heartbeat of a service that has just started and listens."""
    async with asyncio.timeout(30), bus.subscribe(subjects.of("live", service, subjects.ANY)) as beats:
        async for message in beats:
            beat = decode(Live, message.subject, message.payload)
            if beat.uptime_s < uptime_below_s and beat.counters.get("ready"):
                return


def command_line(pid: int) -> str:
    """The arguments of a process, as any user of the machine can read them."""
    return Path(f"/proc/{pid}/cmdline").read_text()


async def test_it_mends_what_dies_and_ends_cleanly(up: Up, tmp_path: Path) -> None:
    pids = await up.pids()
    settings = find(up.environ)
    assert settings.url.startswith("nats://127.0.0.1:")
    assert not any(settings.password in command_line(pid) for pid in pids.values())

    bus = await Bus.connect(settings, name="test")
    try:
        os.kill(pids["arbitrator"], signal.SIGKILL)
        await up.says(r"^arbitrator +ended after")
        await beating(bus, "arbitrator", uptime_below_s=5.0)
        os.kill(pids["broker"], signal.SIGKILL)
        await up.says(r"^broker +ended after")
        await beating(bus, "reward", uptime_below_s=1e9)
        assert find(up.environ) == settings
    finally:
        await bus.close()

    assert await up.end() == 0
    for pid in (pids["collector"], pids["reward"]):
        await asyncio.wait_for(exited(pid), 10)
    assert not path(up.environ).exists()
    assert (tmp_path / ".local" / "state" / "dynamix" / "jetstream" / "jetstream").is_dir()


async def test_its_children_die_with_it_and_a_second_one_is_refused(up: Up, environ: dict[str, str]) -> None:
    pids = await up.pids()
    second = await start(environ)
    assert await second.process.wait() == 1
    with pytest.raises(AssertionError, match=f"it runs already, as process {up.process.pid}"):
        await second.says("never")

    shown = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "dynamix.cli.main", "up", "--print-env"], env=environ, stdout=asyncio.subprocess.PIPE
    )
    lines, _ = await shown.communicate()
    assert f"export DYNAMIX_NATS_URL={find(environ).url}" in lines.decode().splitlines()

    await up.end(signal.SIGKILL)
    async with asyncio.timeout(10):
        await asyncio.gather(*[exited(pid) for pid in pids.values()])


@pytest.mark.parametrize("setting", ["DYNAMIX_NODE=a b", "DYNAMIX_COLLECTOR_PROBE=none"])
async def test_it_ends_when_a_service_cannot_use_its_settings(setting: str, environ: dict[str, str]) -> None:
    name, _, value = setting.partition("=")
    up = await start({**environ, name: value})
    _, said = await asyncio.wait_for(up.process.communicate(), 30)
    assert up.process.returncode
    assert b"starting it again" not in said
    assert said.decode().splitlines()[-1].startswith("dynamix up: ")


async def test_with_a_port_of_metrics_each_service_has_one(environ: dict[str, str]) -> None:
    first = free_ports_in_a_row(3)
    up = await start(environ, "--metrics-port", str(first))
    try:
        await up.pids()
        await up.says(rf"^metrics +http://127\.0\.0\.1:{first} to {first + 2}, /metrics, /livez and /readyz$")
        for port, service in enumerate(("collector", "reward", "arbitrator"), first):
            assert await get(port, "/readyz") == (200, "ok\n")
            assert f'dynamix_ready{{component="{service}"}} 1.0' in (await get(port, "/metrics"))[1]
    finally:
        assert await up.end() == 0


@pytest.mark.timeout(180)
async def test_streams_are_made_again_when_the_broker_comes_back_on_an_emptied_store(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    store = tmp_path / "emptied"
    up = await start(environ, "--store-dir", str(store))
    try:
        broker = (await up.pids())["broker"]
        os.kill(broker, signal.SIGSTOP)  # so that it writes nothing more
        shutil.rmtree(store / "jetstream")
        os.kill(broker, signal.SIGKILL)
        assert "FEED: created" in (await up.says(r"^streams +(.*)$"))[1]
    finally:
        assert await up.end() == 0
