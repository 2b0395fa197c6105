"""Undecodable messages on the subjects that services read: they are counted, stored in DEAD, and change no decision."""

import asyncio
import functools
import hashlib
import json
from collections import Counter
from urllib.parse import urlsplit

import pytest
from tests.support import examples
from tests.support.bus_watch import watching
from tests.support.control_plane import NODE, ControlPlane, control_plane, one_node_job, report_of
from tests.support.decision_checks import check_decisions
from tests.support.faults import Figure

from dynamix.schemas import subjects
from dynamix.schemas.codec import encode
from dynamix.schemas.messages import Dead
from dynamix.schemas.streams import DEAD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZES, SPEEDS = (128,) * 4, (3000.0, 3000.0, 2000.0, 1000.0)
READERS = {"report": "collector", "window": "reward", "state": "arbitrator"}


def payloads(kind: str) -> list[bytes]:
    """Payloads that the kind's reader cannot use."""
    message = {"report": examples.report(NODE), "window": examples.window(NODE), "state": examples.state(NODE)}[kind]
    good = encode(message)
    newer = bytes([*good[:2], good[2] + 1, *good[3:]])
    ranks, generation = examples.state(NODE, (0, 1)), examples.state(NODE, (0, 1, 2, 3), generation=5)
    foreign = [encode(examples.state("node-c", (0, 1))), encode(ranks), encode(generation)] if kind == "state" else []
    return [b"", b"\x00\xff random", good[: len(good) // 2], newer, *foreign]


async def publish_raw(plane: ControlPlane, subject: bytes) -> None:
    """Publish as any client of the broker can, without our checks."""
    settings = plane.server.settings
    url = urlsplit(settings.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    await reader.readline()  # INFO
    options = {"user": settings.user, "pass": settings.password, "verbose": False, "pedantic": False}
    writer.write(b"CONNECT " + json.dumps(options).encode() + b"\r\nPUB " + subject + b" 1\r\n?\r\nPING\r\n")
    await writer.drain()
    assert await reader.readline() == b"PONG\r\n"
    writer.close()
    await writer.wait_closed()


async def test_every_service_counts_undecodable_messages_and_continues(figure: Figure) -> None:
    """Between two of them a good report leads to a reward and an action."""
    sent: Counter[str] = Counter()
    async with control_plane("collector", "reward", "arbitrator") as plane:
        job, window = one_node_job(), 0
        await plane.bus.publish(job)
        for kind, reader in READERS.items():
            for payload in payloads(kind):
                identity = hashlib.sha256(kind.encode() + payload).hexdigest()
                await plane.bus.publish_bytes(subjects.of(kind, job.job, NODE), payload, identity)
                sent[reader] += 1
                await plane.bus.publish(report_of(job, window, SIZES, SPEEDS))
                window += 1
        await plane.bus.publish_bytes(
            subjects.of("state", job.job, "node-c"), encode(examples.state("node-c")), "other"
        )
        await publish_raw(plane, b"dynamix.v1.report.\xff\xfe.a.node-a")
        sent.update(("arbitrator", "collector"))
        await plane.wait_for_actions(window)
        async with watching(plane.bus, job.job) as watch:
            for service, count in sent.items():
                counted = functools.partial(watch.counter, NODE, "dead_letters", service)
                await watch.until(lambda counted=counted, count=count: counted() >= count)
                assert counted() == count
        assert all(service.exit_code() is None for service in plane.services.values())
        await check_decisions(plane.bus, job, num_windows=window)
        await publish_raw(plane, b"dynamix.v1.job.\xff\xfe.a")  # is read by an arbitrator that starts
        plane.services["arbitrator"].kill()
        await plane.start("arbitrator")
        await plane.bus.publish(report_of(job, window, SIZES, SPEEDS))
        await plane.wait_for_actions(window + 1)
        letters = await plane.messages(DEAD.name, f"{subjects.ROOT}.dead.>")
        assert {letter.service for letter in letters if isinstance(letter, Dead) and letter.reason} == set(sent)
        assert any(f"{subjects.ROOT}.job." in str(letter) for letter in letters)
    figure("undecodable_messages", sum(sent.values()))
