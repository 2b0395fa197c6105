"""What floods a broker, sent by one client as fast as the broker takes it. Runs in a process of its own."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from bench.harness.broker import run_with_uvloop
from bench.harness.steady_job import NODE
from bench.messages.load import NodeWindow, Parcel, job_of, node_window, parcel

from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError
from dynamix.runtime.bus.broker.connection import BrokerConnection
from dynamix.runtime.bus.broker.requests import Answer
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.messages import Job, NodeRanks
from dynamix.schemas.streams import ACTIONS, Stream

LARGE_BYTES = 487_000
LARGE_RANKS = 4096
SMALL_RANKS = 4
SMALL_BYTES = 100
SMALL_AT_ONCE = 10_000
"""Sent before it waits until the broker has read them: it reads as fast as it can, and queues or refuses."""
ANSWER_S = 60.0
HOSTILE_JOB = "hostile-0a1b2c3d"
ALL_JOBS = "trainer"
"""The user whose key is for all jobs."""
MADE_UP_JOBS = ("fake", "crowd")
"""Names."""
NUM_AT_ONCE = 64
"""Requests to JetStream's API that wait for their answer."""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What a flood came to."""

    accepted: int
    refused: int
    num_bytes: int
    """All payloads together, refused ones too."""
    seconds: float
    denied: int = 0
    """Refused since the key may not."""


Send = Callable[[BusSettings, int], Coroutine[Any, Any, Sent]]
"""Connects, and sends so many."""


class Flood(NamedTuple):
    """A kind of flood."""

    what: str
    """One of it, in words."""
    full: int
    """How many make the full size."""
    send: Send
    with_key: bool = False
    """By a trainer whose key is for its own job only, to the broker of a deployment; else by a client with all
    permissions of a trainer, to one with a single user."""


def send(name: str, count: int, settings: BusSettings) -> Sent:
    """Send so many of a kind; for a process of its own."""
    return run_with_uvloop(FLOODS[name].send(settings, count))


def job_on_one_node(name: str, num_ranks: int) -> Job:
    """A job whose ranks are all on the node of the honest one."""
    job = job_of(name, num_ranks, "static")
    return msgspec.structs.replace(job, nodes=(NodeRanks(node=NODE, ranks=tuple(range(num_ranks))),))


def measured_of(job: Job) -> NodeWindow:
    """What a job's node measured in its first window."""
    return node_window(job, job.nodes[0], np.random.default_rng(0))


def _jobs(count: int) -> Iterator[Parcel]:
    """Specifications, and a report of each job to the honest job's collector."""
    report = measured_of(job_on_one_node("fake-0", SMALL_RANKS)).report
    for number in range(count):
        job = job_on_one_node(f"fake-{number}", SMALL_RANKS)
        yield parcel(job)
        yield parcel(msgspec.structs.replace(report, job=job.job))


def _reports(count: int) -> Iterator[Parcel]:
    """Reports of one job to the honest job's collector, one per window."""
    measured = measured_of(job_on_one_node("crowd", LARGE_RANKS))
    rows = tuple(msgspec.structs.replace(row, sockets=None, sockets_before=None) for row in measured.report.rows)
    small = measured._replace(report=msgspec.structs.replace(measured.report, rows=rows))  # with sockets over the limit
    for window in range(count):
        yield parcel(small.at(window).report)


def _specifications(count: int) -> Iterator[Parcel]:
    for number in range(count):
        yield Parcel(subjects.of("job", f"large-{number}"), bytes(LARGE_BYTES), f"large:{number}")


def _junk(count: int) -> Iterator[Parcel]:
    for number in range(count):
        yield Parcel(subjects.of("report", "junk", "node-z"), bytes(LARGE_BYTES), f"junk:{number}")


def over_bus(flood: Callable[[Bus, int], Coroutine[Any, Any, Sent]]) -> Send:
    """By a bus, which hears what becomes of each."""

    async def connected(settings: BusSettings, count: int) -> Sent:
        bus = await Bus.connect(settings, name="flood")
        try:
            sent = await flood(bus, count)
            await bus.requests.check_inbox()  # a round trip: one refusal answers all of a subject, read or not
            return sent
        finally:
            await bus.close()

    return connected


def unheard(parcels: Callable[[int], Iterator[Parcel]], *, is_answered: bool = False) -> Send:
    """Without looking at answers: the sender sees not what is stored. They go where none listens, or are not made."""

    async def send_all(settings: BusSettings, count: int) -> Sent:
        connection = BrokerConnection(settings, "flood", None)
        await connection.open(wait=False)
        reply = f"{connection.inbox}.unheard" if is_answered else ""
        try:
            begun, num_bytes = time.monotonic(), 0
            for number, one in enumerate(parcels(count), start=1):
                await connection.send(one.subject, one.payload, reply)
                num_bytes += len(one.payload)
                if number % SMALL_AT_ONCE == 0:
                    await connection.round_trip(ANSWER_S)
            await connection.round_trip(ANSWER_S)
            seconds, denied = time.monotonic() - begun, connection.counters["permission_denials"]
            return Sent(accepted=0, refused=0, num_bytes=num_bytes, seconds=seconds, denied=denied)
        finally:
            await connection.close()

    return send_all


def _small(kind: str, *nodes: str) -> Send:
    """Junk of 100 bytes in the name of its own job."""
    one = Parcel(subjects.of(kind, HOSTILE_JOB, *nodes), bytes(SMALL_BYTES), "")
    return unheard(lambda count: itertools.repeat(one, count))


def _own_reports(count: int) -> Iterator[Parcel]:
    """A job of its own, which is steered, and a report for each window: the services can use all of them."""
    job = job_on_one_node(HOSTILE_JOB, SMALL_RANKS)
    yield parcel(job)
    measured = measured_of(job)
    for window in range(count):
        yield parcel(measured.at(window).report)


def _publishing(parcels: Callable[[int], Iterator[Parcel]]) -> Send:
    async def publish(bus: Bus, count: int) -> Sent:
        begun, futures, num_bytes = time.monotonic(), list[asyncio.Future[int]](), 0
        for one in parcels(count):
            futures.append(await bus.publish_bytes_soon(*one))
            num_bytes += len(one.payload)
            await asyncio.sleep(0)
        return await _judged(futures, num_bytes, begun)

    return over_bus(publish)


def consumers_of(stream: Stream, kind: str, *nodes: str) -> Send:
    """Durable consumers of a stream, each for messages of a kind of one made-up job."""

    async def make(bus: Bus, count: int) -> Sent:
        begun, answers = time.monotonic(), list[Answer | BaseException]()
        for start in range(0, count, NUM_AT_ONCE):
            numbers = range(start, min(count, start + NUM_AT_ONCE))
            asked = [_consumer(bus, stream, f"flood-{number}", (kind, f"fake-{number}", *nodes)) for number in numbers]
            answers += await asyncio.gather(*asked, return_exceptions=True)
        refused = sum(isinstance(answer, BusError) for answer in answers)
        return Sent(
            accepted=count - refused,
            refused=refused,
            num_bytes=0,
            seconds=time.monotonic() - begun,
            denied=num_denied(answers),
        )

    return over_bus(make)


async def _consumer(bus: Bus, stream: Stream, name: str, wanted: Sequence[str]) -> Answer:
    subject = subjects.of(*wanted)
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", "filter_subject": subject}
    body = {"stream_name": stream.name, "config": config, "action": "create"}
    return await bus.requests.ask(f"CONSUMER.CREATE.{stream.name}.{name}.{subject}", body, Answer)


def num_denied(results: Iterable[object]) -> int:
    """How many were refused since the key may not."""
    return sum(isinstance(result, PermissionDeniedError) for result in results)


async def _judged(futures: list[asyncio.Future[int]], num_bytes: int, begun: float) -> Sent:
    results = await asyncio.gather(*futures, return_exceptions=True)
    refused = sum(isinstance(result, BusError) for result in results)
    accepted = sum(isinstance(result, int) for result in results)
    assert refused + accepted == len(results), "the bus raises nothing else"
    seconds = time.monotonic() - begun
    return Sent(accepted=accepted, refused=refused, num_bytes=num_bytes, seconds=seconds, denied=num_denied(results))


FLOODS = {
    "jobs": Flood(
        "jobs of 4 ranks that never end, each with a report to the same collector", 10_000, _publishing(_jobs)
    ),
    "consumers": Flood("durable consumers on ACTIONS", 1000, consumers_of(ACTIONS, "action")),
    "specifications": Flood("specifications of 487 kB", 150, _publishing(_specifications)),
    "junk": Flood("messages of 487 kB into FEED, 1.1 GB", 2260, _publishing(_junk)),
    "reports": Flood("reports of 4,096 ranks to the same collector", 256, _publishing(_reports)),
    "small": Flood("junk receipts of 100 B, of its own job", 1_000_000, _small("applied"), with_key=True),
    "small-reports": Flood(
        "junk reports of 100 B, of its own job, to the same collector", 500_000, _small("report", NODE), with_key=True
    ),
    "own-reports": Flood(
        "reports of 4 ranks, of its own job, to the same collector", 50_000, unheard(_own_reports), with_key=True
    ),
}
