"""What services tell systemd, over a real socket: ready, alive, stopping. Real processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.brokers import ConfiguredServer
from tests.support.notifications import NotificationSocket
from tests.support.service_processes import service_process

from dynamix.cli.services import SERVICES
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import read_supervisor

STUCK = "tests.support.stuck_service"


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[NotificationSocket]:
    with NotificationSocket(tmp_path / "notify") as held:
        yield held


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_is_ready_once_it_reads_its_streams_and_says_that_it_stops(
    server: ConfiguredServer, bus: Bus, systemd: NotificationSocket, service: str
) -> None:
    assert bus.is_connected, "the streams are there"
    async with service_process(server, f"dynamix.{service}", **systemd.environ()) as process:
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
    async with service_process(server, STUCK, *arguments, **systemd.environ(0.4)) as process:
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
    async with service_process(server, STUCK, *arguments, **systemd.environ(0.4)) as process:
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
    assert read_supervisor({**environ, "WATCHDOG_PID": str(os.getpid())}).watchdog_s == 60.0
    assert read_supervisor({**environ, "WATCHDOG_PID": str(os.getppid())}).watchdog_s == 0.0
