"""The collector's shell: nothing that it reads holds up its event loop, and no job another's reports."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Self

import pytest
import structlog
from tests.support import control_plane, examples
from tests.support.brokers import consumer_names

from dynamix.collector import observation, service
from dynamix.collector.observation import CollectorSettings, KernelObserver
from dynamix.collector.procfs import Proc
from dynamix.runtime.bus import Bus, BusMessage
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode, encode
from dynamix.schemas.messages import Message, MetricWindow
from dynamix.schemas.streams import FEED, REPORTS

SIZES, THROUGHPUT = (128,) * 4, (1000.0,) * 4


class Batches:
    """A consumer of what a function returns."""

    def __init__(self, next_batch: Callable[[], Awaitable[list[BusMessage]]]) -> None:
        self._next_batch = next_batch

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[BusMessage]:
        if not (batch := await self._next_batch()):
            raise StopAsyncIteration
        return batch

    async def ack(self, message: BusMessage) -> None:
        """Do nothing: no message is delivered twice."""


class SlowProc(Proc):
    """Reads memory only once somebody else has run."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def memory(self) -> tuple[int, int]:
        self.begun.set()
        self.may_go_on.wait()
        return super().memory()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowProc:
    proc = SlowProc()
    monkeypatch.setattr(observation, "Proc", lambda: proc)
    return proc


def collector(bus: Bus) -> asyncio.Task[None]:
    settings = CollectorSettings(probe="tcp_info")
    context = Context(
        "collector", "0", control_plane.NODE, bus, settings, asyncio.Event(), structlog.stdlib.get_logger()
    )
    return asyncio.create_task(service.serve_observed(context, KernelObserver(context, "not wanted")))


async def test_the_loop_runs_while_the_kernel_is_read(bus: Bus, slow: SlowProc) -> None:
    task = collector(bus)
    job = control_plane.one_node_job()
    async with bus.consume(FEED.name, [subjects.of("window", job.job, control_plane.NODE)], start="new") as windows:
        await listening(bus)
        await bus.publish(control_plane.report_of(job, 0, SIZES, THROUGHPUT))
        await asyncio.to_thread(slow.begun.wait)  # this loop is the collector's, too
        slow.may_go_on.set()
        assert len(await anext(windows)) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_cancelled_caller_waits_for_its_reading_thread(bus: Bus, slow: SlowProc) -> None:
    """The probe is closed next: a thread that still read from it would fall over."""
    task = collector(bus)
    await listening(bus)
    await bus.publish(control_plane.report_of(control_plane.one_node_job(), 0, SIZES, THROUGHPUT))
    await asyncio.to_thread(slow.begun.wait)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    slow.may_go_on.set()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def test_a_job_with_a_crowd_of_large_reports_delays_no_other(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest report of a job that trains is stored behind all of them, and its state comes before theirs."""
    monkeypatch.setattr(service, "READ_SHARE", 20.0)
    task = collector(bus)
    await listening(bus)
    await stopped(task)
    job, ranks = control_plane.one_node_job(), tuple(range(1024))
    await bus.publish(control_plane.report_of(job, 0, SIZES, THROUGHPUT))
    for number in range(12):
        crowd = f"crowd{number % 3}"
        await bus.publish(examples.report(control_plane.NODE, ranks, number, job=crowd))
    await bus.publish(control_plane.report_of(job, 1, SIZES, THROUGHPUT))
    order = []
    states = subjects.of("state", subjects.ANY, control_plane.NODE)
    async with bus.consume(FEED.name, [states], start="new") as stored:
        task = collector(bus)
        while len(order) < 14:
            order += [subjects.parse(message.subject).tokens[0] for message in await anext(stored)]
    await stopped(task)
    assert sorted(order) == sorted([*(2 * [job.job]), *(4 * ["crowd0", "crowd1", "crowd2"])])
    assert order[0] == job.job
    assert order.index(job.job, 1) <= 4


class CrowdOnSlowBroker:
    """A bus that stores nothing: an honest report, a crowd of jobs in one batch, then again the honest job's."""

    NUM_CROWD = 40

    def __init__(self) -> None:
        self.handled: list[str] = []
        self.is_over = asyncio.Event()
        self._honest = control_plane.one_node_job()
        self._num_batches = 0

    def consume(self, *_: object, **__: object) -> Batches:
        return Batches(self._next_batch)

    async def _next_batch(self) -> list[BusMessage]:
        number, self._num_batches = self._num_batches, self._num_batches + 1
        for _ in range(4):  # from the socket over client and consumer
            await asyncio.sleep(0)
        if number == 1:
            crowd = [examples.report(control_plane.NODE, job=f"crowd{one}") for one in range(self.NUM_CROWD)]
            return [self._message(report, 2 + at) for at, report in enumerate(crowd)]
        if number == 3:
            await asyncio.Event().wait()
        return [self._message(control_plane.report_of(self._honest, number // 2, SIZES, THROUGHPUT), 100 * number + 1)]

    def _message(self, report: Message, sequence: int) -> BusMessage:
        return BusMessage(subjects.subject_of(report), encode(report), sequence, 0, 0)

    async def publish_bytes_soon(self, _subject: str, _payload: bytes, message_id: str) -> asyncio.Future[int]:
        kind, job, *_ = message_id.split(":")
        if kind == "state":
            self.handled.append(job)
        if len(self.handled) == self.NUM_CROWD + 2:
            self.is_over.set()
        return asyncio.get_running_loop().create_future()

    async def newest(self, *_: str) -> None:
        """Nothing is stored."""

    async def publish(self, message: Message) -> int:
        raise AssertionError(f"{message} waits for no room")


async def test_a_known_jobs_report_is_next_after_the_one_that_is_handled_also_while_nothing_is_stored() -> None:
    """What came meanwhile is read after each report, and no report waits until the one before it is stored."""
    bus = CrowdOnSlowBroker()
    context: Context[CollectorSettings] = Context(
        *("collector", "0", control_plane.NODE, bus, CollectorSettings(probe="tcp_info")),
        *(asyncio.Event(), structlog.stdlib.get_logger()),
    )
    task = asyncio.create_task(service.serve_observed(context, KernelObserver(context, "not wanted")))
    await bus.is_over.wait()
    await stopped(task)
    honest = control_plane.one_node_job().job
    assert bus.handled[0] == honest
    assert bus.handled.index(honest, 1) <= 2


async def test_what_was_read_and_not_handled_comes_again_after_a_restart(bus: Bus, slow: SlowProc) -> None:
    """A report that waits for its turn is not acknowledged, also when a later one is done."""
    task = collector(bus)
    await listening(bus)
    job = control_plane.one_node_job()
    for window in range(3):
        await bus.publish(control_plane.report_of(job, window, SIZES, THROUGHPUT))
    await asyncio.to_thread(slow.begun.wait)
    task.cancel()
    slow.may_go_on.set()
    await stopped(task)
    task = collector(bus)
    windows: set[int] = set()
    async with bus.consume(FEED.name, [subjects.of("window", job.job, control_plane.NODE)], start="all") as stored:
        while windows != {0, 1, 2}:
            windows |= {decode(MetricWindow, one.subject, one.payload).window for one in await anext(stored)}
    await stopped(task)


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def listening(bus: Bus) -> None:
    """Wait until the collector's consumer is there."""
    while f"collector-{control_plane.NODE}" not in await consumer_names(bus, REPORTS.name):  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.005)
