"""`dynamix up` as a real process, how it keeps its children running, and how commands find its broker."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.support.http_get import free_ports_in_a_row, get

from dynamix.cli import connection
from dynamix.cli.commands.up import Child, exited, keep
from dynamix.cli.connection import find, path
from dynamix.cli.errors import CommandError
from dynamix.cli.services import ServiceProcess, beside, bus_environment
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
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
def metrics_port() -> int:
    return free_ports_in_a_row(3)


@pytest.fixture
async def up(environ: dict[str, str], metrics_port: int) -> AsyncIterator[Up]:
    running = await start(environ, "--metrics-port", str(metrics_port))
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


async def test_its_children_show_metrics_and_die_with_it_and_a_second_one_is_refused(
    up: Up, environ: dict[str, str], metrics_port: int
) -> None:
    pids = await up.pids()
    for port, service in enumerate(("collector", "reward", "arbitrator"), metrics_port):
        assert await get(port, "/readyz") == (200, "ok\n")
        assert f'dynamix_ready{{component="{service}"}} 1.0' in (await get(port, "/metrics"))[1]
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


# --- children are kept running ---


async def test_a_killed_child_is_started_again_until_that_works_and_stopped_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dynamix.cli.commands.up.MIN_WAIT_S", 0.01)
    begun: list[subprocess.Popen[bytes]] = []
    refusals, started = [OSError("no memory")], asyncio.Event()

    async def start() -> None:
        if len(begun) == 2 and refusals:
            raise refusals.pop()
        begun.append(subprocess.Popen(["sleep", "600"]))  # noqa: ASYNC220 - returns at once
        started.set()

    async def stop() -> None:
        begun[-1].terminate()

    await start()
    async with beside(keep(Child("sleeper", lambda: begun[-1].pid, start, stop))):
        for expected in (2, 3):
            started.clear()
            begun[-1].kill()
            await asyncio.wait_for(started.wait(), 60)
            assert len(begun) == expected
        assert begun[-1].poll() is None
    assert [one.wait(60) for one in begun] == [-9, -9, -15]
    assert "sleeper    does not start: no memory" in capsys.readouterr().err


# --- how commands find the broker: environment first, then the file of dynamix up, then the default ---

BROKER = BusSettings(url="nats://127.0.0.1:4999", user="dynamix", password="secret-123")


@pytest.fixture
def private(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path / "home")}


def test_a_running_up_is_found_by_a_file_for_its_user_only_while_it_runs(private: dict[str, str]) -> None:
    with connection.published(BROKER, private) as file:
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert connection.find(private) == connection.find({**private, "DYNAMIX_NATS_URL": ""}) == BROKER
        found = connection.find({**private, "DYNAMIX_NATS_URL": "nats://127.0.0.1:5000"})
        assert (found.url, found.password) == ("nats://127.0.0.1:5000", ""), "the environment counts more"
        file.chmod(0o644)
        with pytest.raises(CommandError, match="is open to other users"):
            connection.find(private)
        file.chmod(0o600)
        content = file.read_bytes()
        file.write_text("{")
        with pytest.raises(CommandError, match="remove it"):
            connection.find(private)
    assert connection.find(private) == BusSettings()
    file.write_bytes(content)  # left by a process that is gone
    file.chmod(0o600)
    assert connection.find(private) == BusSettings()


def test_a_misspelt_variable_is_a_usage_error_that_names_the_right_one(private: dict[str, str]) -> None:
    with pytest.raises(CommandError, match="DYNAMIX_NATS_URL") as caught:
        connection.find({**private, "DYNAMIX_NATS_ULR": "nats://x"})
    assert caught.value.exit_code == 2


def test_without_a_runtime_directory_it_lies_in_the_cache(tmp_path: Path) -> None:
    private = {"HOME": str(tmp_path)}
    with connection.published(BROKER, private) as file:
        assert file == tmp_path / ".cache" / "dynamix" / "connection.json"
        assert connection.find(private) == BROKER


def test_the_file_of_a_later_up_is_left_alone(private: dict[str, str]) -> None:
    later = msgspec.structs.replace(BROKER, url="nats://127.0.0.1:5000")
    with contextlib.ExitStack() as stack:
        with connection.published(BROKER, private):
            stack.enter_context(connection.published(later, private))
        assert connection.find(private) == later


def test_services_of_a_command_know_no_other_broker_than_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a deployment left in the shell: they would wait for a TLS that this broker does not have."""
    for name in ("CA_FILE", "CREDS_FILE"):
        monkeypatch.setenv(f"DYNAMIX_NATS_{name}", "/etc/dynamix/left")
    monkeypatch.setenv("DYNAMIX_LOG_LEVEL", "error")
    given = ServiceProcess("reward", bus_environment(BROKER))._environ
    assert {name for name in given if name.startswith("DYNAMIX_NATS_")} == {*bus_environment(BROKER)}
    assert given["DYNAMIX_LOG_LEVEL"] == "error"
    assert ServiceProcess("reward", {})._environ["DYNAMIX_NATS_CA_FILE"] == "/etc/dynamix/left"
