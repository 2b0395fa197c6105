"""A disk that was full: every view says that nothing is stored, and `dynamix up` starts the broker again."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.brokers import connected, until

from dynamix.cli.commands.up.store_watch import AGAIN_AFTER_S, MIN_ROOM_BYTES, PATIENCE_S, StoreJudge
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.broker import requests
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.bus.streams import publisher
from dynamix.runtime.embedded import EmbeddedServer

REPORT = "dynamix.v1.report.job-1.node-a"
DISK_MIB = 40


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
        done, _ = await asyncio.wait([stored], timeout=3)
        if not done or stored.exception() is not None:
            return
    raise AssertionError("the disk does not fill")


async def test_after_a_full_disk_the_broker_stores_again_only_when_it_is_started_again(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "LATE_S", 1.0)
    monkeypatch.setattr(requests, "LATE_S", 1.0)
    async with EmbeddedServer(store_dir=small_disk / "store") as server, connected(server.settings) as bus:
        await provision(bus)
        junk = fill(small_disk)
        await publish_until_nothing_is_stored(bus)
        junk.unlink()
        stored = await bus.publish_bytes_soon(REPORT, b"after", "after")
        await until(lambda: bus.counters["unacknowledged"] + bus.counters["failed_lately"])
        os.kill(server.pid, signal.SIGTERM)
        await server.restart()
        async with asyncio.timeout(30):
            await stored
        await until(lambda: not bus.counters["unacknowledged"])


def test_a_broker_that_stores_nothing_is_restarted_once_there_is_room() -> None:
    judge = StoreJudge()
    assert judge.judge(0, 0, 0.0) == ""
    assert judge.judge(3, MIN_ROOM_BYTES, 1.0) == ""
    assert judge.judge(3, MIN_ROOM_BYTES - 1, 1.0 + PATIENCE_S) == "full"
    assert judge.judge(3, MIN_ROOM_BYTES, 2.0 + PATIENCE_S) == ""
    assert judge.judge(3, MIN_ROOM_BYTES, 1.0 + PATIENCE_S + AGAIN_AFTER_S) == "restart"
    assert judge.judge(0, MIN_ROOM_BYTES, 100.0) == ""
    assert judge.judge(1, MIN_ROOM_BYTES, 200.0) == ""
    assert judge.judge(0, MIN_ROOM_BYTES, 205.0) == ""
    assert judge.judge(1, MIN_ROOM_BYTES, 206.0) == ""
    assert judge.judge(1, MIN_ROOM_BYTES, 215.0) == ""
    assert judge.judge(1, MIN_ROOM_BYTES, 216.0) == "restart"
