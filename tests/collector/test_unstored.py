"""Which reports are done with, and how many may be in flight."""

import asyncio

import pytest
import structlog
from tests.support import control_plane, examples

from dynamix.collector import unstored
from dynamix.collector.observation import CollectorSettings
from dynamix.collector.turns import WaitingReport
from dynamix.collector.unstored import UnstoredOutputs
from dynamix.runtime.bus import Bus, BusMessage, PublishError, StreamFullError
from dynamix.runtime.service import Context


class InFlight:
    """Reports of one output each, numbered from 1, and what the broker answers."""

    def __init__(self, bus: Bus) -> None:
        self.context = Context(
            *("collector", "0", control_plane.NODE, bus, CollectorSettings()),
            *(asyncio.Event(), structlog.stdlib.get_logger()),
        )
        self.outputs = UnstoredOutputs(self.context)
        self.futures: list[asyncio.Future[int]] = []

    def add(self, num_reports: int, num_bytes: int = 10) -> None:
        for _ in range(num_reports):
            self.futures.append(asyncio.get_running_loop().create_future())
            message = BusMessage("subject", bytes(num_bytes), len(self.futures), 0, 0)
            self.outputs.add(WaitingReport(message, is_newest=True), [(examples.state(), self.futures[-1])])

    def store(self, *numbers: int) -> None:
        for number in numbers:
            self.futures[number - 1].set_result(number)

    async def settled(self, *, is_idle: bool) -> list[int]:
        return [report.message.sequence for report in await self.outputs.settle_some(is_idle=is_idle)]


@pytest.fixture
async def flight(bus: Bus) -> InFlight:
    return InFlight(bus)


async def test_a_report_is_done_with_once_it_and_all_before_it_are_stored(flight: InFlight) -> None:
    flight.add(4)
    assert await flight.settled(is_idle=True) == []
    flight.store(2, 3)
    assert await flight.settled(is_idle=True) == []
    assert flight.outputs.awaited is flight.futures[0]
    flight.store(1)
    assert await flight.settled(is_idle=False) == [], "there is other work, and room"
    assert await flight.settled(is_idle=True) == [1, 2, 3]
    assert flight.outputs.awaited is flight.futures[3]


async def test_a_report_that_gave_nothing_waits_for_those_before_it_only(flight: InFlight) -> None:
    flight.add(1)
    flight.outputs.add(WaitingReport(BusMessage("subject", b"", 2, 0, 0), is_newest=True), [])
    assert await flight.settled(is_idle=True) == []
    flight.store(1)
    assert await flight.settled(is_idle=True) == [1, 2]


@pytest.mark.parametrize(("limit", "value", "num_bytes"), [("MAX_UNSTORED", 8, 10), ("MAX_UNSTORED_BYTES", 8000, 1000)])
async def test_with_too_many_in_flight_half_of_them_are_waited_for(
    flight: InFlight, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, num_bytes: int
) -> None:
    monkeypatch.setattr(unstored, limit, value)
    flight.add(8, num_bytes)
    assert await flight.settled(is_idle=False) == []
    flight.add(1, num_bytes)
    waiting = asyncio.create_task(flight.settled(is_idle=False))
    flight.store(1, 2, 3, 4)
    await asyncio.sleep(0)
    assert not waiting.done()
    flight.store(5)
    async with asyncio.timeout(20):
        assert await waiting == [1, 2, 3, 4, 5]


async def test_a_state_that_a_full_stream_refuses_is_published_when_there_is_room(flight: InFlight) -> None:
    flight.add(1)
    flight.futures[0].set_exception(StreamFullError("FEED is full"))
    assert await flight.settled(is_idle=True) == [1]


async def test_a_report_whose_state_found_no_room_before_the_stop_is_not_done_with(
    flight: InFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(*_: object) -> bool:
        return False

    monkeypatch.setattr(flight.context, "publish_when_room", no_room)
    flight.add(1)
    flight.futures[0].set_exception(StreamFullError("FEED is full"))
    assert await flight.settled(is_idle=True) == []
    assert flight.outputs.gave_up


async def test_an_output_that_cannot_be_stored_ends_the_service(flight: InFlight) -> None:
    flight.add(1)
    flight.futures[0].set_exception(PublishError("refused"))
    with pytest.raises(PublishError, match="refused"):
        await flight.settled(is_idle=True)
