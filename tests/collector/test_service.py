"""The collector's shell: what it reads of the kernel does not hold up its event loop."""

import asyncio
import threading

import pytest
import structlog
from tests.support import control_plane
from tests.support.brokers import consumer_names

from dynamix.collector import observation, service
from dynamix.collector.observation import CollectorSettings
from dynamix.collector.procfs.proc import Proc
from dynamix.runtime.bus import Bus
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED

SIZES, THROUGHPUT = (128,) * 4, (1000.0,) * 4


class SlowProc(Proc):
    """Reads memory only once somebody else has run."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def memory(self) -> tuple[int, int]:
        self.begun.set()
        assert self.may_go_on.wait(20)
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
        assert await asyncio.to_thread(slow.begun.wait, 20)  # this loop is the collector's, too
        slow.may_go_on.set()
        async with asyncio.timeout(20):
            assert len(await anext(windows)) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_cancelled_caller_waits_for_its_reading_thread(bus: Bus, slow: SlowProc) -> None:
    """The probe is closed next: a thread that still read from it would fall over."""
    task = collector(bus)
    await listening(bus)
    await bus.publish(control_plane.report_of(control_plane.one_node_job(), 0, SIZES, THROUGHPUT))
    assert await asyncio.to_thread(slow.begun.wait, 20)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    slow.may_go_on.set()
    async with asyncio.timeout(20):
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def listening(bus: Bus) -> None:
    """Wait until the collector's consumer is there."""
    async with asyncio.timeout(20):
        while f"collector-{control_plane.NODE}" not in await consumer_names(bus, FEED.name):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
