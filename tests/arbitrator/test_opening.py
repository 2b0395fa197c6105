"""A crowd of jobs: opened beside those that are steered, in bounded number, and forgotten again."""

import asyncio
import random
from collections import Counter

import msgspec
import pytest
import structlog
from tests.support import examples
from tests.support.brokers import operate, until
from tests.support.services_here import arbitrator_here

from dynamix.arbitrator import service
from dynamix.arbitrator.deciding.job_log import JobLog
from dynamix.arbitrator.deciding.waiting_jobs import WaitingJobs
from dynamix.arbitrator.service import MAX_OPENING, ArbitratorSettings
from dynamix.arbitrator.shown import ShownDecisions
from dynamix.runtime.bus import Bus, BusMessage, PublishError
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Applied, Job, State
from dynamix.schemas.streams import ACTIONS, FEED

NUM_CROWD = 100
NODES = {"node-a": (0, 1)}
HONEST = examples.job(NODES, policy="static")
Arbitrating = Context[ArbitratorSettings]


def crowd() -> list[Job]:
    return [examples.job(NODES, job=f"crowd-{number}", policy="static") for number in range(NUM_CROWD)]


def state_of(job: Job, window: int = 0) -> State:
    return msgspec.structs.replace(examples.state("node-a", (0, 1), window), job=job.job)


async def until_counter(context: Arbitrating, name: str, value: int) -> None:
    async with asyncio.timeout(60):
        while context.counters.get(name) != value:  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0.01)


async def decisions(bus: Bus, job: str, count: int) -> list[int]:
    """The windows of a job's first decisions."""
    found: list[int] = []
    async with asyncio.timeout(60), bus.consume(ACTIONS.name, [subjects.of("action", job)], start="all") as consumer:
        async for batch in consumer:
            found += [decode(Action, one.subject, one.payload).window for one in batch]
            if len(found) >= count:
                return found
    raise AssertionError("the consumer ended")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[State]:
    """The states that the arbitrator has read so far."""
    found, record = list[State](), ShownDecisions.record_state

    def note(shown: ShownDecisions, state: State) -> None:
        found.append(state)
        record(shown, state)

    monkeypatch.setattr(ShownDecisions, "record_state", note)
    return found


async def test_a_crowd_of_new_jobs_does_not_delay_one_that_is_open(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the crowd can be opened, as if each took for ever: the job that is open is decided all the same."""
    opened = JobLog.open
    entered = []

    async def stuck(job: Job, *arguments: object) -> JobLog:
        if job.job != HONEST.job:
            entered.append(job.job)
            await asyncio.Event().wait()
        return await opened(job, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(JobLog, "open", stuck)
    await bus.publish(HONEST)
    async with arbitrator_here(bus) as context:
        await bus.publish(state_of(HONEST))
        assert await decisions(bus, HONEST.job, 1) == [0]
        for job in crowd():
            await bus.publish_soon(job)
            await bus.publish_soon(state_of(job))
        await until_counter(context, "jobs_waiting", NUM_CROWD)
        await bus.publish(state_of(HONEST, 1))
        assert await decisions(bus, HONEST.job, 2) == [0, 1]
        assert len(entered) == MAX_OPENING


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
        await until_counter(context, "jobs_waiting", 0)
        await bus.publish(state_of(HONEST))
        assert await decisions(bus, HONEST.job, 1) == [0]
        await bus.publish(state_of(slow))
        async with asyncio.timeout(60):
            await entered.wait()
        await bus.publish(state_of(HONEST, 1))
        assert await decisions(bus, HONEST.job, 2) == [0, 1]


async def test_a_restart_decides_for_all_jobs_and_opens_none_without_states(bus: Bus) -> None:
    jobs = crowd()
    for job in jobs:
        await bus.publish_soon(job)
    for job in jobs[:3]:
        await bus.publish(state_of(job))
    async with arbitrator_here(bus) as context:
        for job in jobs[:3]:
            assert await decisions(bus, job.job, 1) == [0]
        await until_counter(context, "jobs_waiting", 0)
        assert context.counters["jobs"] == 3


def test_the_job_with_the_most_states_is_opened_first_and_no_more_wait_than_may() -> None:
    waiting = WaitingJobs(max_jobs=3)
    for sequence, name in enumerate("abcbdb", start=1):
        waiting.add_state(name, BusMessage("subject", bytes(9000), sequence, 0, 0), 0)
    assert len(waiting) == 3
    ((job, wanted),) = waiting.take(1)
    assert (job, wanted.newest, wanted.num_states) == ("b", 6, 3)
    assert wanted.example is not None
    assert (wanted.example.sequence, len(wanted.example.payload)) == (2, 4096)
    assert [name for name, _ in waiting.take(5)] == ["a", "c"]


def test_jobs_that_wait_are_taken_in_the_order_of_their_states_however_they_came() -> None:
    chance, waiting, came = random.Random(7), WaitingJobs(max_jobs=50), list[str]()
    for sequence in range(1, 400):
        job = f"job-{chance.randrange(60)}"
        if waiting.add_state(job, BusMessage("subject", b"", sequence, 0, 0), 0):
            came.append(job)
    counts = Counter(came)
    got_there = {job: max(at for at, one in enumerate(came) if one == job) for job in counts}
    expected = sorted(counts, key=lambda job: (-counts[job], got_there[job]))
    taken = [job for _ in range(30) for job, _ in waiting.take(2)]
    assert (taken, len(waiting)) == (expected, 0)


async def test_a_specification_of_a_made_up_generation_stops_no_job_that_is_open(bus: Bus) -> None:
    await bus.publish(HONEST)
    async with arbitrator_here(bus) as context:
        await bus.publish(state_of(HONEST))
        assert await decisions(bus, HONEST.job, 1) == [0]
        await bus.publish(msgspec.structs.replace(HONEST, generation=2**53 - 1))
        await bus.publish(msgspec.structs.replace(state_of(HONEST), generation=2**53 - 1))
        await until_counter(context, "dead_letters", 2)  # the specification, and a state without one
        await bus.publish(state_of(HONEST, 1))
        assert await decisions(bus, HONEST.job, 2) == [0, 1]


async def test_a_job_that_falls_behind_is_decided_once_for_each_window(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what was put off from FEED again; meanwhile hardly anything may wait."""
    monkeypatch.setattr(service, "MAX_BEHIND", 8)
    monkeypatch.setattr(service, "MAX_QUEUED_BYTES", 1)
    await bus.publish(HONEST)
    async with arbitrator_here(bus) as context:
        await bus.publish(state_of(HONEST))
        assert await decisions(bus, HONEST.job, 1) == [0]
        await asyncio.gather(*[await bus.publish_soon(state_of(HONEST, window)) for window in range(1, 300)])
        assert await decisions(bus, HONEST.job, 300) == list(range(300))
        assert context.counters["states_put_off"] > 8


async def test_a_generation_that_comes_while_a_job_is_opened_is_opened_next(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, read: list[State]
) -> None:
    opened, entered, goes_on = JobLog.open, asyncio.Event(), asyncio.Event()

    async def late(job: Job, *arguments: object) -> JobLog:
        entered.set()
        await goes_on.wait()
        return await opened(job, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(JobLog, "open", late)
    await bus.publish(HONEST)
    async with arbitrator_here(bus) as context:
        await bus.publish(state_of(HONEST))
        await entered.wait()
        await bus.publish(msgspec.structs.replace(HONEST, generation=1))
        await bus.publish(msgspec.structs.replace(state_of(HONEST), generation=1))
        await bus.publish(msgspec.structs.replace(state_of(HONEST), generation=5))
        await until(lambda: len(read) == 3)
        goes_on.set()
        assert await decisions(bus, HONEST.job, 2) == [0, 0]
        await until_counter(context, "dead_letters", 1)  # generation 5 has no specification


async def test_a_job_of_before_the_start_is_opened_once_and_decided_in_order_though_states_come_meanwhile(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, read: list[State]
) -> None:
    num_opened, opened, goes_on = 0, JobLog.open, asyncio.Event()

    async def slow(job: Job, *arguments: object) -> JobLog:
        nonlocal num_opened
        num_opened += 1
        await goes_on.wait()
        return await opened(job, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(JobLog, "open", slow)
    await bus.publish(HONEST)
    await bus.publish(state_of(HONEST))
    async with arbitrator_here(bus) as context:
        await until(lambda: num_opened == 1)
        for window in range(1, 5):
            await bus.publish(state_of(HONEST, window))
        await until(lambda: len(read) == 4)
        goes_on.set()
        assert await decisions(bus, HONEST.job, 5) == [0, 1, 2, 3, 4]
        await until_counter(context, "jobs_waiting", 0)
    assert num_opened == 1


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
        assert await decisions(bus, HONEST.job, 1) == [0]


async def test_an_idle_job_is_forgotten_and_goes_on_with_its_next_state(bus: Bus) -> None:
    await bus.publish(HONEST)
    async with arbitrator_here(bus, forget_after_s=0.2) as context:
        await bus.publish(state_of(HONEST))
        assert await decisions(bus, HONEST.job, 1) == [0]
        await until_counter(context, "jobs", 0)
        await bus.publish(state_of(HONEST, 1))
        assert await decisions(bus, HONEST.job, 2) == [0, 1]


@pytest.mark.parametrize("limits", [{"max_jobs": 1}, {"max_ranks": 3}])
async def test_jobs_that_have_no_room_beside_each_other_are_decided_in_turn(bus: Bus, limits: dict[str, int]) -> None:
    jobs = [HONEST, examples.job(NODES, job="other-0", policy="static")]
    for job in jobs:
        await bus.publish(job)
    async with arbitrator_here(bus, **limits) as context:
        for window in range(3):
            for job in jobs:
                await bus.publish(state_of(job, window))
                assert await decisions(bus, job.job, window + 1) == list(range(window + 1))
                await until_counter(context, "jobs", 1)


async def test_a_job_is_taken_up_again_after_actions_alone_was_made_again(bus: Bus) -> None:
    """It goes on behind the newest receipt, with a gap: trainers have applied what is decided before."""
    await bus.publish(HONEST)
    async with arbitrator_here(bus) as context:
        for window in range(3):
            await bus.publish(state_of(HONEST, window))
        assert await decisions(bus, HONEST.job, 3) == [0, 1, 2]
        await bus.publish(
            Applied(
                job=HONEST.job,
                generation=0,
                decided_window=2,
                effective_window=4,
                effective_step=40,
                local_batch_sizes=(128, 128),
            )
        )
        await operate(bus, f"STREAM.DELETE.{ACTIONS.name}")
        await provision(bus)
        await bus.publish(state_of(HONEST, 3))
        await until_counter(context, "jobs", 0)
        await bus.publish(state_of(HONEST, 4))
        assert await decisions(bus, HONEST.job, 2) == [3, 4]
        assert "halted" not in context.counters


async def test_an_error_of_the_bus_in_one_job_ends_the_service(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise PublishError("no broker")

    monkeypatch.setattr(JobLog, "add_state", fail)
    await bus.publish(HONEST)
    await bus.publish(state_of(HONEST))
    context = Context("arbitrator", "0", "here", bus, ArbitratorSettings(), asyncio.Event(), structlog.get_logger())
    with pytest.raises(PublishError, match="no broker"):
        async with asyncio.timeout(60):
            await service.serve(context)
