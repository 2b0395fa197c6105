"""A job's decisions on a real bus: the first arbitrator decides, also by which policy."""

from collections import Counter

import pytest
import structlog
from tests.support import examples, learned

from dynamix.arbitrator.deciding.action_store import ActionStoreError
from dynamix.arbitrator.deciding.job_log import JobLog, Surroundings
from dynamix.arbitrator.families.source import ProfileSource
from dynamix.arbitrator.learned.policy_source import PolicySource
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Event, Job
from dynamix.schemas.streams import ACTIONS, FEED, POLICIES

JOB = examples.job({"node-a": (0, 1)}, policy="mine")
SHRINKS, GROWS = (learned.policy_file("deltas", favour=choice).to_bytes() for choice in (1, 2))


async def opened(bus: Bus, counts: Counter[str], job: Job = JOB) -> JobLog:
    """A job's log as an arbitrator of its own would open it."""

    def count(name: str) -> None:
        counts[name] += 1

    log = structlog.stdlib.get_logger()
    around = Surroundings(bus, PolicySource(PolicyStore(bus)), ProfileSource(bus, log, count), log, count)
    return await JobLog.open(job, around)


async def newest_action(bus: Bus) -> Action:
    message = await bus.last(ACTIONS.name, subjects.of("action", JOB.job))
    assert message is not None
    return decode(Action, message.subject, message.payload)


async def test_the_second_of_two_arbitrators_adopts_the_policy_version_of_the_first(bus: Bus) -> None:
    counts = Counter[str]()
    store = PolicyStore(bus)
    stored = await store.put("mine", SHRINKS)
    first = await opened(bus, counts)
    await store.put("mine", GROWS)
    second = await opened(bus, counts)
    await first.add_state(1, examples.state())
    await second.add_state(1, examples.state())  # refused by the broker: window 0 is decided
    assert counts == {"decided": 1, "adopted": 1}
    await second.add_state(2, examples.state(window_index=1))
    action = await newest_action(bus)
    assert (action.window, action.policy_version, action.policy_digest) == (1, 1, stored.digest)
    assert action.deltas == (-25, -25)


async def test_the_second_decides_nothing_when_the_version_of_the_first_is_gone(bus: Bus) -> None:
    store = PolicyStore(bus)
    await store.put("mine", SHRINKS)
    first = await opened(bus, Counter())
    await store.put("mine", GROWS)
    second = await opened(bus, Counter())
    await first.add_state(1, examples.state())
    await bus.purge(POLICIES.name, subjects.of("policy", "mine"), keep=1)
    with pytest.raises(ValueError, match="version 1 of policy 'mine' which decided this generation so far, is gone"):
        await second.add_state(1, examples.state())
    assert (await newest_action(bus)).window == 0


async def test_an_action_for_another_number_of_ranks_is_not_this_jobs(bus: Bus) -> None:
    await bus.publish_next(examples.action(policy="mine"), expected_last=0)
    with pytest.raises(ActionStoreError, match="sizes 4 ranks, the job has 2"):
        await opened(bus, Counter())


async def test_sizes_that_stick_to_their_minimum_are_an_event_once(bus: Bus) -> None:
    """From 128 in steps of 25: at 32 from the fourth decision, stuck with the 23rd."""
    counts = Counter[str]()
    await PolicyStore(bus).put("mine", SHRINKS)
    log = await opened(bus, counts)
    for window in range(30):
        await log.add_state(window + 1, examples.state(window_index=window))
    assert (counts["decided"], counts["size_stuck"]) == (30, 1)
    subject = subjects.of("event", JOB.job)
    async with bus.consume(FEED.name, [subject], start="all") as consumer:
        batch = await anext(aiter(consumer))
    events = [decode(Event, message.subject, message.payload) for message in batch]
    assert [(event.signature, event.window, event.value, event.service) for event in events] == [
        ("size-stuck", 22, 1.0, "arbitrator")
    ]


async def test_static_sizes_are_never_reported_as_stuck(bus: Bus) -> None:
    counts = Counter[str]()
    log = await opened(
        bus, counts, examples.job({"node-a": (0, 1)}, policy="static", initial_local_batch_sizes=(32, 32))
    )
    for window in range(30):
        await log.add_state(window + 1, examples.state(window_index=window))
    assert counts == {"decided": 30}
