"""The states of each job in their order, and no job waits for another's."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.support import examples

from dynamix.arbitrator import state_queues
from dynamix.arbitrator.state_queues import StateQueues
from dynamix.runtime.bus import BusMessage, PublishError
from dynamix.schemas.messages import State

PAYLOAD = bytes(1000)


class Folding:
    """Folds states of a job only as its gate lets them through, and notes what became of them."""

    def __init__(self, *, may_put_off: bool = True) -> None:
        self.gates: dict[str, asyncio.Semaphore] = {}
        self.folded: list[tuple[str, int]] = []
        self.put_off: list[tuple[str, int]] = []
        self.queues = StateQueues(self._fold, self._put_off, may_put_off=may_put_off)

    async def _fold(self, _message: BusMessage, state: State) -> None:
        if state.job in self.gates:
            await self.gates[state.job].acquire()
        self.folded.append((state.job, state.window))

    def _put_off(self, _message: BusMessage, state: State) -> None:
        self.put_off.append((state.job, state.window))

    def add(self, job: str, *windows: int) -> None:
        self.queues.add_states((BusMessage("", PAYLOAD, 1 + window, 0, 0), state_of(job, window)) for window in windows)


def state_of(job: str, window: int) -> State:
    return msgspec.structs.replace(examples.state("node-a", (0, 1), window), job=job)


@pytest.fixture
async def folding() -> AsyncIterator[Folding]:
    folding = Folding()
    yield folding
    await folding.queues.close()


async def changed(folding: Folding) -> None:
    async with asyncio.timeout(10):
        await folding.queues.changed.wait()
    folding.queues.check()


async def test_a_job_whose_decision_takes_for_ever_delays_no_other(folding: Folding) -> None:
    folding.gates["stuck"] = asyncio.Semaphore(0)
    for window in range(3):
        folding.add("stuck", window)
        folding.add("honest", window)
        await changed(folding)
    assert folding.folded == [("honest", 0), ("honest", 1), ("honest", 2)]
    assert folding.queues.num_bytes == 2 * len(PAYLOAD), "one is being folded"


async def test_the_states_of_a_job_keep_their_order(folding: Folding) -> None:
    folding.gates["a"] = asyncio.Semaphore(0)
    folding.add("a", 0, 1)
    await asyncio.sleep(0)
    folding.add("a", 2)
    for _ in range(3):
        folding.gates["a"].release()
    await changed(folding)
    assert folding.folded == [("a", 0), ("a", 1), ("a", 2)]
    assert folding.queues.num_bytes == 0


@pytest.mark.parametrize(("limit", "value"), [("MAX_BEHIND", 3), ("MAX_BEHIND_BYTES", 3 * len(PAYLOAD))])
async def test_a_job_that_falls_behind_is_put_off_once_its_decision_is_made(
    folding: Folding, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(state_queues, limit, value)
    folding.gates["a"] = asyncio.Semaphore(0)
    folding.add("a", 0)
    await asyncio.sleep(0)
    folding.add("a", 1, 2, 3, 4)
    await asyncio.sleep(0)
    assert folding.put_off == [], "what is read of it again begins behind the decision"
    folding.gates["a"].release()
    await changed(folding)
    assert folding.folded == [("a", 0)]
    assert folding.put_off == [("a", 1), ("a", 2), ("a", 3), ("a", 4)]


async def test_in_a_replay_no_job_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_queues, "MAX_BEHIND", 1)
    folding = Folding(may_put_off=False)
    folding.add("a", 0, 1, 2)
    await folding.queues.drained()
    assert (len(folding.folded), folding.put_off) == (3, [])


async def test_an_error_of_the_bus_is_raised_where_lanes_are_looked_at() -> None:
    async def fail(*_: object) -> None:
        raise PublishError("no broker")

    failing = StateQueues(fail, lambda *_: None, may_put_off=True)
    failing.add_states([(BusMessage("", PAYLOAD, 1, 0, 0), state_of("a", 0))])
    await failing.drained()
    await failing.changed.wait()
    with pytest.raises(PublishError, match="no broker"):
        failing.check()


async def test_no_more_is_read_while_too_much_waits(folding: Folding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_queues, "MAX_QUEUED_BYTES", 2 * len(PAYLOAD))
    folding.gates["a"] = asyncio.Semaphore(0)
    folding.add("a", 0)
    assert folding.queues.has_room
    folding.add("a", 1)
    assert not folding.queues.has_room
