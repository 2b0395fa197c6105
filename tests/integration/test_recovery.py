"""Services that start late, and messages that no client of ours sends: reading goes on."""

import asyncio
import json
from urllib.parse import urlsplit

from tests.support.control_plane import (
    ControlPlane,
    control_plane,
    feed_windows,
    one_node_job,
    report_of,
)

from dynamix.schemas import subjects
from dynamix.schemas.messages import Dead
from dynamix.schemas.streams import DEAD, FEED

SPEEDS = (3000.0, 3000.0, 3000.0, 1000.0)
SIZES = (128, 128, 128, 128)


async def publish_raw(plane: ControlPlane, subject: bytes, payload: bytes) -> None:
    """Publish as any client of the broker can, without our checks."""
    settings = plane.server.settings
    url = urlsplit(settings.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    await reader.readline()  # INFO
    options = {"user": settings.user, "pass": settings.password, "verbose": False, "pedantic": False}
    writer.write(b"CONNECT " + json.dumps(options).encode() + b"\r\n")
    writer.write(b"PUB " + subject + b" %d\r\n" % len(payload) + payload + b"\r\nPING\r\n")
    await writer.drain()
    assert await reader.readline() == b"PONG\r\n"
    writer.close()
    await writer.wait_closed()


async def test_a_subject_that_is_not_utf8_is_a_dead_letter_and_reading_continues() -> None:
    async with control_plane("collector", "arbitrator") as plane:
        job = one_node_job(policy="static")
        await publish_raw(plane, b"dynamix.v1.job.\xff\xfe.a", b"?")
        await publish_raw(plane, b"dynamix.v1.report.\xff\xfe.a.node-a", b"?")
        plane.services["arbitrator"].kill()
        await plane.start("arbitrator")
        await plane.bus.publish(job)
        await plane.bus.publish(report_of(job, 0, SIZES, SPEEDS))
        assert len(await plane.wait_for_actions(1)) == 1
        letters = await plane.wait_for(DEAD.name, f"{subjects.ROOT}.dead.>", 2)
        assert {letter.service for letter in letters if isinstance(letter, Dead)} == {"collector", "arbitrator"}


async def test_an_arbitrator_that_starts_late_catches_up_with_every_running_job() -> None:
    async with control_plane("collector") as plane:
        jobs = [one_node_job(job=f"job-{index}", policy="random") for index in range(3)]
        for job in jobs:
            await plane.bus.publish(job)
            await feed_windows(plane, job, range(20), every_s=0.0)
        await plane.wait_for(FEED.name, subjects.of("state", "*", "*"), 60)
        await plane.start("arbitrator")
        for job in jobs:
            actions = await plane.wait_for_actions(20, job.job)
            assert [action.window for action in actions] == list(range(20))
