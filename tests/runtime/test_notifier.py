"""What services tell systemd, over a real socket: ready, alive, stopping. Real processes."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.brokers import ConfiguredServer
from tests.support.small_service import service_process

from dynamix.cli.services import SERVICES
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import read_supervisor

BLOCK = ("--mode", "block")


class NotificationSocket:
    """systemd's notification socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(str(path))
        self._lines: list[str] = []

    def environ(self, watchdog_s: float = 0.0) -> dict[str, str]:
        """What systemd sets for a unit with `Type=notify` and, perhaps, `WatchdogSec=`."""
        usec = {"WATCHDOG_USEC": f"{watchdog_s * 1e6:.0f}"} if watchdog_s else {}
        return {"NOTIFY_SOCKET": str(self._path), **usec}

    async def line(self) -> str:
        if not self._lines:
            datagram = await asyncio.get_running_loop().sock_recv(self.socket, 4096)
            self._lines = datagram.decode().split("\n")
        return self._lines.pop(0)

    async def lines_until(self, last: str) -> list[str]:
        """All lines before this one."""
        found = []
        while (line := await self.line()) != last:
            found.append(line)
        return found

    async def silence(self, seconds: float) -> None:
        """Wait until nothing came for so long; what comes before is dropped."""
        self._lines = []
        with contextlib.suppress(TimeoutError):
            while True:
                await asyncio.wait_for(self.line(), seconds)


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[NotificationSocket]:
    found = NotificationSocket(tmp_path / "notify")
    yield found
    found.socket.close()


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_is_ready_once_it_reads_its_streams_and_says_that_it_stops(
    server: ConfiguredServer, bus: Bus, systemd: NotificationSocket, service: str
) -> None:
    assert bus.is_connected, "the streams are there"
    async with service_process(server, module=f"dynamix.{service}", **systemd.environ()) as process:
        before = await systemd.lines_until("READY=1")
        assert before[-1] == "STATUS=working"
        assert set(before) <= {"STATUS=waiting for the broker", "STATUS=not reading its streams yet", "STATUS=working"}
        process.send_signal(signal.SIGTERM)
        assert await systemd.line() == "STOPPING=1"
        await process.communicate()
    assert process.returncode == 0


async def test_a_frozen_loop_sends_no_sign_of_life_and_one_that_comes_back_does(
    server: ConfiguredServer, bus: Bus, systemd: NotificationSocket, tmp_path: Path
) -> None:
    assert bus.is_connected, "the streams are there"
    trigger = tmp_path / "now"
    arguments = ("--trigger", str(trigger), "--block-s", "4", "--stuck-after-s", "0")
    async with service_process(server, *BLOCK, *arguments, **systemd.environ(0.4)) as process:
        for _ in range(5):
            await systemd.lines_until("WATCHDOG=1")
        trigger.touch()
        await systemd.silence(2)
        assert process.returncode is None
        assert await systemd.line() == "WATCHDOG=1"


async def test_an_interpreter_that_is_stuck_sends_none_and_shows_where_when_systemd_aborts_it(
    server: ConfiguredServer, bus: Bus, systemd: NotificationSocket, tmp_path: Path
) -> None:
    assert bus.is_connected, "the streams are there"
    trigger = tmp_path / "now"
    arguments = ("--trigger", str(trigger), "--hold-lock", "--stuck-after-s", "1")
    async with service_process(server, *BLOCK, *arguments, **systemd.environ(0.4)) as process:
        await systemd.lines_until("WATCHDOG=1")
        trigger.touch()
        await systemd.silence(3)
        assert process.returncode is None, "our own watchdog cannot see it"
        process.send_signal(signal.SIGABRT)  # as systemd does after WatchdogSec=
        _, stderr = await process.communicate()
    assert process.returncode == -signal.SIGABRT
    assert b"in hold_interpreter_lock" in stderr


def test_a_watchdog_for_another_process_is_not_ours() -> None:
    environ = {"NOTIFY_SOCKET": "/run/systemd/notify", "WATCHDOG_USEC": "60000000"}
    assert read_supervisor({**environ, "WATCHDOG_PID": str(os.getpid())})[1] == 60.0
    assert read_supervisor({**environ, "WATCHDOG_PID": str(os.getppid())})[1] == 0.0
