"""The collector's shell: nothing that it reads holds up its event loop, and no job another's reports."""

import asyncio
import threading

import pytest
import structlog
from tests.support import control_plane, examples
from tests.support.brokers import ConfiguredServer, connected, consumer_names, until

from dynamix.collector import observation, service
from dynamix.collector.observation import CollectorSettings
from dynamix.collector.procfs import Proc
from dynamix.runtime.bus import Bus
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import MetricWindow
from dynamix.schemas.streams import FEED, REPORTS

SIZES, THROUGHPUT = (128,) * 4, (1000.0,) * 4


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
    return asyncio.create_task(service.serve(context))


async def test_the_loop_runs_while_the_kernel_is_read(bus: Bus, slow: SlowProc) -> None:
    task = collector(bus)
    job = control_plane.one_node_job()
    async with bus.consume(FEED.name, [subjects.of("window", job.job, control_plane.NODE)], start="new") as windows:
        await listening(bus)
        await bus.publish(control_plane.report_of(job, 0, SIZES, THROUGHPUT))
        await asyncio.to_thread(slow.begun.wait)  # this loop is the collector's, too
        slow.may_go_on.set()
        assert len(await anext(windows)) == 1
    await stopped(task)


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


async def test_a_job_with_a_crowd_of_large_reports_delays_no_other_also_while_nothing_is_stored(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest report of a job that trains lies behind all of them, and no report waits for the one before it."""
    monkeypatch.setattr(service, "READ_SHARE", 20.0)
    task = collector(bus)
    await listening(bus)
    await stopped(task)
    job, ranks = control_plane.one_node_job(), tuple(range(1024))
    await bus.publish(control_plane.report_of(job, 0, SIZES, THROUGHPUT))
    for number in range(12):
        await bus.publish(examples.report(control_plane.NODE, ranks, number, job=f"crowd{number % 3}"))
    await bus.publish(control_plane.report_of(job, 1, SIZES, THROUGHPUT))
    order: list[str] = []

    async def never_stored(_subject: str, _payload: bytes, message_id: str) -> asyncio.Future[int]:
        kind, name, *_ = message_id.split(":")
        order.extend([name] if kind == "state" else [])
        return asyncio.get_running_loop().create_future()

    async with connected(server.settings) as other:
        monkeypatch.setattr(other, "publish_bytes_soon", never_stored)
        task = collector(other)
        await until(lambda: len(order) == 14)
        await stopped(task)
    assert sorted(order) == sorted([*(2 * [job.job]), *(4 * ["crowd0", "crowd1", "crowd2"])])
    assert order[0] == job.job
    assert order.index(job.job, 1) <= 4


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
