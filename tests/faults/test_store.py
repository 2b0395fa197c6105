"""A store whose disk was full, which every view says until `dynamix up` starts the broker again; and one made anew."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support import examples
from tests.support.brokers import ConfiguredServer, connected, until
from tests.support.control_plane import ControlPlane, feed_windows, one_node_job
from tests.support.http_get import free_port, get

from dynamix.cli.commands.doctor import bus as broker_checks
from dynamix.cli.commands.up import AGAIN_AFTER_S, MIN_ROOM_BYTES, PATIENCE_S, StoreJudge
from dynamix.cli.connection import find
from dynamix.runtime.bus import Bus, publish, requests
from dynamix.runtime.bus.health import Watchdog
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.metrics import MetricsServer, ServiceMetrics
from dynamix.runtime.service import ServiceState
from dynamix.schemas.messages import Live

REPORT = "dynamix.v1.report.job.1.node-a"
DISK_MIB = 48
"""A broker that has just begun takes 6, and is started again where 16 are free."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"this user may mount nothing: {made.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """A file that takes all that is left."""
    junk = place / "junk"
    with junk.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    return junk


async def publish_until_nothing_is_stored(bus: Bus) -> None:
    """Publish until an acknowledgement is missing."""
    for number in range(20 * DISK_MIB):
        stored = await bus.publish_bytes_soon(REPORT, os.urandom(60_000), f"m{number}")
        done, _ = await asyncio.wait([stored], timeout=10)
        if not done or stored.exception() is not None:
            return
    raise AssertionError("the disk does not fill")


@contextlib.asynccontextmanager
async def ready_path(bus: Bus) -> AsyncIterator[int]:
    """The port of a service of this connection that reads its streams."""
    metrics = ServiceMetrics("collector")
    metrics.counters["ready"] = 1
    state = ServiceState("node-a", "node-a", asyncio.Event(), Watchdog(20.0), metrics)
    state.bus = bus
    async with MetricsServer("127.0.0.1", 0, metrics, state.not_ready) as server:
        yield server.port


async def test_after_a_full_disk_the_broker_stores_again_only_when_it_is_started_again(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "LATE_S", 1.0)
    monkeypatch.setattr(requests, "LATE_S", 1.0)
    monitoring = free_port()
    async with (
        ConfiguredServer(store_dir=small_disk / "store", extra=f"http: 127.0.0.1:{monitoring}") as server,
        connected(server.settings) as bus,
        ready_path(bus) as port,
    ):
        await provision(bus)
        assert await get(port, "/readyz") == (200, "ok\n")
        assert (await get(monitoring, "/healthz"))[0] == 200
        junk = fill(small_disk)
        await publish_until_nothing_is_stored(bus)
        junk.unlink()
        stored = await bus.publish_bytes_soon(REPORT, b"after", "after")
        await until(lambda: bus.counters["unacknowledged"])
        status, reason = await get(port, "/readyz")
        assert status == 503
        assert re.fullmatch(r"the broker has not acknowledged \d messages for 5 s: is its disk full\?\n", reason)
        status, reason = await get(monitoring, "/healthz")
        assert status == 503
        assert "no space left on device" in reason
        os.kill(server.pid, signal.SIGTERM)
        await server.restart()
        async with asyncio.timeout(120):
            await stored
        await until(lambda: not bus.counters["unacknowledged"])
        assert await get(port, "/readyz") == (200, "ok\n")
        assert (await get(monitoring, "/healthz"))[0] == 200


async def train(bus: Bus) -> None:
    """Publish and beat like a training process, until cancelled."""
    for number in range(1_000):
        await bus.publish_bytes_soon(REPORT, b"a report", f"r{number}")
        counters = {f"bus_{name}": count for name, count in bus.counters.items()}
        await bus.publish_live(Live(service="trainer", instance="job-1", uptime_s=1.0, counters=counters))
        await asyncio.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_up_starts_a_broker_that_stores_nothing_again_once_its_disk_has_room(
    small_disk: Path, tmp_path: Path
) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("DYNAMIX_", "XDG_"))}
    environ |= {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "dynamix.cli.main", "up", "--store-dir", str(small_disk / "store")]
    up = await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.PIPE)
    assert up.stderr is not None

    async def says(pattern: str) -> None:
        async with asyncio.timeout(120):
            while not re.search(pattern, line := (await up.stderr.readline()).decode()):
                assert line, "it ended"

    try:
        await says("^stop +Ctrl-C")
        async with connected(find(environ)) as bus:
            junk = fill(small_disk)
            await publish_until_nothing_is_stored(bus)
            training = asyncio.create_task(train(bus))
            await says(r"^broker +it has not answered \d+ messages or requests for 10 s: .* has 0 MiB left, make room")
            found = {check.name: check for check in await broker_checks(find(environ), configured=True)}
            assert "did not store or answer" in found["storage"].found
            junk.unlink()
            await says(r"^broker +it has not answered .*, and there is room: starting it again")
            await says(r"^streams +as they were")
            await until(lambda: not bus.counters["unacknowledged"])
            assert await bus.publish_bytes(REPORT, b"after", "after")
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
    finally:
        up.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            assert await up.wait() == 0


def test_a_broker_that_stores_nothing_is_restarted_once_there_is_room() -> None:
    judge = StoreJudge()
    assert judge.judge(0, 0, 0.0) == ""
    assert judge.judge(3, MIN_ROOM_BYTES, 1.0) == ""
    assert judge.judge(3, MIN_ROOM_BYTES - 1, 1.0 + PATIENCE_S) == "full"
    assert judge.judge(3, MIN_ROOM_BYTES - 1, 2.0 + PATIENCE_S) == ""
    assert judge.judge(3, MIN_ROOM_BYTES, 3.0 + PATIENCE_S) == "restart"
    assert judge.judge(3, MIN_ROOM_BYTES, 2.0 + PATIENCE_S + AGAIN_AFTER_S) == ""
    assert judge.judge(3, MIN_ROOM_BYTES, 3.0 + PATIENCE_S + AGAIN_AFTER_S) == "restart"
    assert judge.judge(0, MIN_ROOM_BYTES, 100.0) == ""
    assert judge.judge(1, MIN_ROOM_BYTES, 200.0) == ""
    assert judge.judge(0, MIN_ROOM_BYTES, 205.0) == ""
    assert judge.judge(1, MIN_ROOM_BYTES, 206.0) == ""
    assert judge.judge(1, MIN_ROOM_BYTES, 215.0) == ""
    assert judge.judge(1, MIN_ROOM_BYTES, 216.0) == "restart"


# --- streams that are made again while a job runs ---


@pytest.mark.usefixtures("services")
async def test_a_running_job_is_steered_on_after_its_streams_were_made_again(plane: ControlPlane) -> None:
    """Its newest action may be applied, and said so, after the streams were made again that it was in."""
    job = one_node_job(policy="rule")
    await plane.bus.publish(job)
    await feed_windows(plane, job, range(30))
    before = (await plane.wait_for_actions(30))[-1]
    assert before.window == 29
    await plane.server.kill()
    shutil.rmtree(plane.server._directory / "store")
    await plane.server.start()
    async with connected(plane.server.settings, "operator") as operator:
        await provision(operator)
    feeding = asyncio.create_task(feed_windows(plane, job, range(30, 1000), every_s=0.1))
    try:
        await plane.bus.publish(
            examples.applied(29, 31, local_batch_sizes=before.local_batch_sizes, action_hash=before.hash)
        )
        await asyncio.sleep(1.0)
        await plane.bus.publish(job)  # rank 0 looks every 10 s
        first, second, *_ = await plane.wait_for_actions(3)
    finally:
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feeding
    assert (first.gap, first.previous_hash, second.gap) == (True, b"", False)
    assert 30 <= first.window <= 100
    assert second.window == first.window + 1
    assert all(process.exit_code() is None for process in plane.services.values())
