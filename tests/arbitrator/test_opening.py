"""Jobs in memory: opened beside those that are steered, in bounded number, dropped and read again."""

import asyncio

import msgspec
import pytest
from tests.arbitrator.test_job_log import state as state_of
from tests.support import examples
from tests.support.arbitrators import stored_actions
from tests.support.brokers import operate, until
from tests.support.services_here import arbitrator_here, context_of

from dynamix.arbitrator import service
from dynamix.arbitrator.deciding.job_log import JobLog
from dynamix.arbitrator.service import MAX_OPENING
from dynamix.arbitrator.shown import ShownDecisions
from dynamix.runtime.bus import Bus, BusMessage, PublishError
from dynamix.runtime.bus.provision import provision
from dynamix.schemas.messages import Job, State
from dynamix.schemas.streams import ACTIONS, FEED

NUM_CROWD = 100
NODES = {"node-a": (0, 1)}
HONEST = examples.job(NODES, policy="static")


def crowd() -> list[Job]:
    return [examples.job(NODES, job=f"crowd-{number}", policy="static") for number in range(NUM_CROWD)]


async def windows(bus: Bus, job: str, count: int) -> list[int]:
    """The windows of a job's first decisions."""
    return [action.window for action in await stored_actions(bus, job, count)]


@pytest.fixture
def goes_on() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch, goes_on: asyncio.Event) -> list[Job]:
    """The jobs that began to be opened, each of which waits for `goes_on`."""
    opened, found = JobLog.open, list[Job]()

    async def slow(job: Job, *arguments: object) -> JobLog:
        found.append(job)
        await goes_on.wait()
        return await opened(job, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(JobLog, "open", slow)
    return found


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[State]:
    """The states that the arbitrator has read so far."""
    found, record = list[State](), ShownDecisions.record_state

    def note(shown: ShownDecisions, state: State) -> None:
        found.append(state)
        record(shown, state)

    monkeypatch.setattr(ShownDecisions, "record_state", note)
    return found


async def test_a_crowd_of_new_jobs_does_not_delay_one_that_is_open(
    bus: Bus, opening: list[Job], goes_on: asyncio.Event
) -> None:
    """None of the crowd can be opened, as if each took for ever: the job that is open is decided all the same."""
    goes_on.set()
    await bus.publish(HONEST)
    async with arbitrator_here(bus) as context:
        await bus.publish(state_of(HONEST))
        assert await windows(bus, HONEST.job, 1) == [0]
        goes_on.clear()
        for job in crowd():
            await bus.publish_soon(job)
            await bus.publish_soon(state_of(job))
        await until(lambda: context.counters.get("jobs_waiting") == NUM_CROWD)
        await bus.publish(state_of(HONEST, 1))
        assert await windows(bus, HONEST.job, 2) == [0, 1]
        assert len(opening) == 1 + MAX_OPENING


async def test_a_job_whose_decision_is_not_stored_delays_no_other(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    folded, entered = JobLog.add_state, asyncio.Event()
    slow = examples.job(NODES, job="slow-0", policy="static")

    async def stuck(log: JobLog, sequence: int, state: State) -> None:
        if state.job == slow.job:
            entered.set()
            await asyncio.Event().wait()
        await folded(log, sequence, state)

    monkeypatch.setattr(JobLog, "add_state", stuck)
    for job in (HONEST, slow):
        await bus.publish(job)
    async with arbitrator_here(bus) as context:
        await until(lambda: context.counters.get("jobs_waiting") == 0)
        await bus.publish(state_of(HONEST))
        assert await windows(bus, HONEST.job, 1) == [0]
        await bus.publish(state_of(slow))
        async with asyncio.timeout(60):
            await entered.wait()
        await bus.publish(state_of(HONEST, 1))
        assert await windows(bus, HONEST.job, 2) == [0, 1]


async def test_a_restart_decides_for_all_jobs_and_opens_none_without_states(bus: Bus) -> None:
    jobs = crowd()
    for job in jobs:
        await bus.publish_soon(job)
    for job in jobs[:3]:
        await bus.publish(state_of(job))
    async with arbitrator_here(bus) as context:
        for job in jobs[:3]:
            assert await windows(bus, job.job, 1) == [0]
        await until(lambda: context.counters.get("jobs_waiting") == 0)
        assert context.counters["jobs"] == 3


async def test_a_job_whose_states_go_on_is_opened_before_a_crowd_that_waits_longer_and_no_more_wait_than_may(
    bus: Bus, opening: list[Job], goes_on: asyncio.Event, read: list[State]
) -> None:
    jobs = [*crowd()[: MAX_OPENING + 2], HONEST]
    for job in jobs:
        await bus.publish(job)
    async with arbitrator_here(bus, max_jobs=3) as context:
        await until(lambda: context.counters.get("jobs_waiting") == 0)
        for job in jobs:
            await bus.publish(state_of(job))
        await bus.publish(state_of(HONEST, 1))
        await bus.publish(state_of(crowd()[-1]))  # it has no room to wait
        await until(lambda: len(read) == len(jobs) + 2)
        goes_on.set()
        assert await windows(bus, HONEST.job, 2) == [0, 1]
        await until(lambda: context.counters.get("jobs_waiting") == 0)
        assert context.counters["jobs_put_off"] == 1
    assert opening[MAX_OPENING].job == HONEST.job


async def test_a_specification_of_a_made_up_generation_stops_no_job_that_is_open(bus: Bus) -> None:
    await bus.publish(HONEST)
    async with arbitrator_here(bus) as context:
        await bus.publish(state_of(HONEST))
        assert await windows(bus, HONEST.job, 1) == [0]
        await bus.publish(msgspec.structs.replace(HONEST, generation=2**53 - 1))
        await bus.publish(msgspec.structs.replace(state_of(HONEST), generation=2**53 - 1))
        await until(lambda: context.counters.get("dead_letters") == 2)  # the specification, and a state without one
        await bus.publish(state_of(HONEST, 1))
        assert await windows(bus, HONEST.job, 2) == [0, 1]


async def test_a_job_that_falls_behind_is_decided_once_for_each_window(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what was put off from FEED again; meanwhile hardly anything may wait."""
    monkeypatch.setattr(service, "MAX_BEHIND", 1)
    monkeypatch.setattr(service, "MAX_QUEUED_BYTES", 1)
    await bus.publish(HONEST)
    async with arbitrator_here(bus) as context:
        await bus.publish(state_of(HONEST))
        assert await windows(bus, HONEST.job, 1) == [0]
        await asyncio.gather(*[await bus.publish_soon(state_of(HONEST, window)) for window in range(1, 300)])
        assert await windows(bus, HONEST.job, 300) == list(range(300))
        assert context.counters["states_put_off"] > 0


async def test_states_and_a_generation_that_come_while_a_job_is_opened_are_decided_in_order(
    bus: Bus, opening: list[Job], goes_on: asyncio.Event, read: list[State]
) -> None:
    await bus.publish(HONEST)
    await bus.publish(state_of(HONEST))
    async with arbitrator_here(bus) as context:
        await until(lambda: len(opening) == 1)
        for window in (1, 2):
            await bus.publish(state_of(HONEST, window))
        await bus.publish(msgspec.structs.replace(HONEST, generation=1))
        for generation in (1, 5):  # the latter has no specification
            await bus.publish(msgspec.structs.replace(state_of(HONEST), generation=generation))
        await until(lambda: len(read) == 4)
        goes_on.set()
        assert await windows(bus, HONEST.job, 4) == [0, 1, 2, 0]
        await until(lambda: context.counters.get("dead_letters") == 1)
    assert [job.generation for job in opening] == [0, 1]


async def test_a_state_that_comes_while_a_job_is_found_to_have_none_is_decided(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, read: list[State]
) -> None:
    """The broker has answered that there is none; the state is read before that answer is."""
    last, asked, goes_on = Bus.last, asyncio.Event(), asyncio.Event()

    async def late(self: Bus, stream: str, subject: str) -> BusMessage | None:
        found = await last(self, stream, subject)
        if stream == FEED.name and not asked.is_set():
            asked.set()
            await goes_on.wait()
        return found

    monkeypatch.setattr(Bus, "last", late)
    await bus.publish(HONEST)
    async with arbitrator_here(bus):
        await asked.wait()
        await bus.publish(state_of(HONEST))
        await until(lambda: len(read) == 1)
        goes_on.set()
        assert await windows(bus, HONEST.job, 1) == [0]


@pytest.mark.parametrize("limits", [{"max_jobs": 1}, {"max_ranks": 3}, {"forget_after_s": 0.2}])
async def test_jobs_that_were_dropped_from_memory_go_on_with_their_next_state(
    bus: Bus, limits: dict[str, float]
) -> None:
    jobs, num_held = [HONEST, examples.job(NODES, job="other-0", policy="static")], 1 - ("forget_after_s" in limits)
    for job in jobs:
        await bus.publish(job)
    async with arbitrator_here(bus, **limits) as context:
        await until(lambda: context.counters.get("ready"))  # of the states before, those of one job have room to wait
        for window in range(3):
            for job in jobs:
                await bus.publish(state_of(job, window))
                assert await windows(bus, job.job, window + 1) == list(range(window + 1))
                await until(lambda: context.counters.get("jobs") == num_held)


async def test_a_job_is_taken_up_again_after_actions_alone_was_made_again(bus: Bus) -> None:
    """It goes on behind the newest receipt, with a gap: trainers have applied what is decided before."""
    await bus.publish(HONEST)
    async with arbitrator_here(bus) as context:
        for window in range(3):
            await bus.publish(state_of(HONEST, window))
        assert await windows(bus, HONEST.job, 3) == [0, 1, 2]
        await bus.publish(examples.applied(2, 4, job=HONEST.job, local_batch_sizes=(128, 128)))
        await operate(bus, f"STREAM.DELETE.{ACTIONS.name}")
        await provision(bus)
        await bus.publish(state_of(HONEST, 3))
        await until(lambda: context.counters.get("jobs") == 0)
        await bus.publish(state_of(HONEST, 4))
        assert await windows(bus, HONEST.job, 2) == [3, 4]
        assert "halted" not in context.counters


async def test_an_error_of_the_bus_in_one_job_ends_the_service(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise PublishError("no broker")

    monkeypatch.setattr(JobLog, "add_state", fail)
    await bus.publish(HONEST)
    await bus.publish(state_of(HONEST))
    context = context_of(bus)
    with pytest.raises(PublishError, match="no broker"):
        async with asyncio.timeout(60):
            await service.serve(context)
