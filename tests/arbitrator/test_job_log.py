"""A job's decisions on a real bus: the first arbitrator decides, and none decides on top of actions that were lost."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.support import examples, learned
from tests.support.brokers import ConfiguredServer, connected, operate, until
from tests.support.old_server import OldServer
from tests.support.services_here import arbitrator_here, context_of

from dynamix.arbitrator import service
from dynamix.arbitrator.deciding import job_log
from dynamix.arbitrator.deciding.job_log import ActionsEndEarlyError, ActionStoreError, JobLog
from dynamix.arbitrator.learned.policy_store import PolicyAbsentError, PolicyStore
from dynamix.arbitrator.policies.policy import Policy
from dynamix.runtime.bus import Bus, BusMessage, requests
from dynamix.runtime.bus.provision import provision
from dynamix.schemas import subjects
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Applied, Event, Job, State
from dynamix.schemas.streams import ACTIONS, FEED

NODES: dict[str, tuple[int, ...]] = {"node-a": (0, 1)}
JOB = examples.job(NODES, job="first-0", policy="static")
OTHER = examples.job(NODES, job="other-0", policy="static")
LEARNED = examples.job(NODES, job="learned-0", policy="mine")
SIZES = (128, 128)
SHRINKS, GROWS = (learned.policy_file("deltas", favour=(choice,)).to_bytes() for choice in (1, 2))


async def opened(bus: Bus, job: Job = JOB, counts: Counter[str] | None = None) -> JobLog:
    """A job's log as an arbitrator that has just started opens it."""
    return await JobLog.open(job, context_of(bus, counts), PolicyStore(bus))


def state(job: Job, window: int = 0) -> State:
    return msgspec.structs.replace(examples.state("node-a", (0, 1), window), job=job.job)


async def decide(bus: Bus, log: JobLog, windows: range) -> None:
    """Let it decide these windows, from states as FEED numbers them."""
    for window in windows:
        published = state(log.job, window)
        await log.add_state(await bus.publish(published), published)


async def actions(bus: Bus, job: Job = JOB) -> list[Action]:
    found, start = [], 1
    while (message := await bus.first(ACTIONS.name, subjects.of("action", job.job), start=start)) is not None:
        found.append(decode(Action, message.subject, message.payload))
        start = message.sequence + 1
    return found


def receipt(action: Action, **changes: Any) -> Applied:
    """What the trainer publishes once all ranks have adopted it."""
    fields = {"job": action.job, "local_batch_sizes": action.local_batch_sizes, "action_hash": action.hash}
    return examples.applied(action.window, action.window + 2, **(fields | changes))


async def test_the_second_of_two_arbitrators_adopts_the_policy_version_of_the_first(bus: Bus) -> None:
    counts, store = Counter[str](), PolicyStore(bus)
    stored = await store.put("mine", SHRINKS)
    first = await opened(bus, LEARNED, counts)
    await store.put("mine", GROWS)
    second = await opened(bus, LEARNED, counts)
    await decide(bus, first, range(1))
    await decide(bus, second, range(1))  # refused by the broker: window 0 is decided
    assert counts == {"decided": 1, "adopted": 1}
    await decide(bus, second, range(1, 2))
    action = (await actions(bus, LEARNED))[-1]
    assert (action.window, action.policy_version, action.policy_digest) == (1, 1, stored.digest)
    assert action.deltas == (-25, -25)


async def test_sizes_that_stick_to_their_minimum_are_an_event_once_and_static_ones_never(bus: Bus) -> None:
    """From 128 in steps of 25: at 32 from the fourth decision, stuck with the 23rd."""
    counts = Counter[str]()
    await PolicyStore(bus).put("mine", SHRINKS)
    for job in (LEARNED, msgspec.structs.replace(JOB, initial_local_batch_sizes=(32, 32))):
        await decide(bus, await opened(bus, job, counts), range(30))
    assert (counts["decided"], counts["size_stuck"]) == (60, 1)
    async with bus.consume(FEED.name, [subjects.of("event", subjects.ANY)], start="all") as consumer:
        batch = await anext(aiter(consumer))
    events = [decode(Event, message.subject, message.payload) for message in batch]
    assert [(event.job, event.signature, event.window, event.value, event.service) for event in events] == [
        (LEARNED.job, "size-stuck", 22, 1.0, "arbitrator")
    ]


async def test_an_action_that_was_changed_or_is_of_another_job_is_refused(bus: Bus) -> None:
    await bus.publish_next(examples.action(job=OTHER.job), expected_last=0)
    with pytest.raises(ActionStoreError, match="sizes 4 ranks, the job has 2"):
        await opened(bus, OTHER)
    sealed = seal(examples.action(3, job=JOB.job, local_batch_sizes=SIZES, deltas=(0, 0)), b"p" * 32)
    forged = examples.with_levers(sealed, local_batch_sizes=(32, 1024))
    await bus.publish_next(forged, expected_last=0)
    with pytest.raises(ActionStoreError, match="its hash does not match its content"):
        await opened(bus)


async def test_a_log_that_ends_before_what_the_trainer_applied_is_refused(bus: Bus) -> None:
    await decide(bus, await opened(bus), range(4))
    await bus.publish(receipt((await actions(bus))[2]))
    await decide(bus, await opened(bus), range(4, 6))
    assert [action.window for action in await actions(bus)] == list(range(6))
    last = (await actions(bus))[-1]
    await bus.publish(receipt(last, action_hash=b"h" * 32))
    with pytest.raises(ActionStoreError, match="is not the action for window 5 of generation 0 that the trainer"):
        await opened(bus)
    await bus.publish(receipt(last, decided_window=7))
    with pytest.raises(ActionStoreError, match=r"ends at 6 \(window 5 .*applied an action for window 7") as caught:
        await opened(bus)
    assert (caught.value.window, caught.value.known_window) == (5, 7)
    await bus.publish(receipt(last, job=OTHER.job))
    with pytest.raises(ActionStoreError, match="ends at nothing, but the trainer applied an action for window 5"):
        await opened(bus, OTHER)


async def test_a_takeover_between_reading_receipt_and_log_halts_no_healthy_job(bus: Bus) -> None:
    """The other arbitrator decides, and the trainer adopts, while this one starts."""
    other = await opened(bus)
    await decide(bus, other, range(2))
    await bus.publish(receipt((await actions(bus))[-1]))
    last, reads = bus.last, []

    async def slow(stream: str, subject: str) -> BusMessage | None:
        found = await last(stream, subject)
        reads.append(stream)
        if len(reads) == 1:
            await decide(bus, other, range(2, 3))
            await bus.publish(receipt((await actions(bus))[-1]))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bus, "last", slow)
        log = await opened(bus)
    assert log.known is not None
    assert log.known.action.window == 2


async def test_a_job_whose_actions_were_dropped_for_room_continues(bus: Bus) -> None:
    """At the first start and for an arbitrator that ran all the while; a full stream is no lost one."""
    await provision(bus, [msgspec.structs.replace(ACTIONS, max_bytes=2000)])
    log = await opened(bus)
    await decide(bus, log, range(2))
    await bus.publish(receipt((await actions(bus))[-1]))
    await decide(bus, await opened(bus, OTHER), range(20))
    assert await actions(bus) == []
    await decide(bus, log, range(2, 3))
    assert [action.window for action in await actions(bus)] == [2]
    await decide(bus, await opened(bus, OTHER), range(20, 40))
    await opened(bus)


async def test_a_running_arbitrator_refuses_another_chain_than_its_own(bus: Bus) -> None:
    log = await opened(bus)
    await decide(bus, log, range(2))
    options = {"job": JOB.job, "local_batch_sizes": SIZES, "deltas": (0, 0)}
    third = seal(examples.action(2, **options), (await actions(bus))[-1].hash)
    fourth = seal(examples.action(3, **options), b"x" * 32)
    sequence = await bus.publish_next(third, expected_last=2)
    await bus.publish_next(fourth, expected_last=sequence)
    with pytest.raises(ActionStoreError, match="breaks the chain: the action for window 3 of generation 0 does"):
        await decide(bus, log, range(2, 3))
    await operate(bus, "STREAM.DELETE.ACTIONS")
    await provision(bus)
    with pytest.raises(ActionStoreError, match="ends at nothing, before our own 2"):
        await decide(bus, log, range(3, 4))
    assert await actions(bus) == []


HEADER_BYTES = 22
"""Length (4, its top bit says that headers follow), sequence (8), time (8), length of the subject (2)."""
HASH_BYTES = 8


def flip_bit(store: Path, stream: str, index: int, *, in_header: bool) -> None:
    """Change a small stream's record: a bit of its length, or one in the middle of what was published."""
    (block,) = store.glob(f"jetstream/*/streams/{stream}/msgs/*.blk")
    data = bytearray(block.read_bytes())
    ends = [0]
    while ends[-1] < len(data):
        length = int.from_bytes(data[ends[-1] : ends[-1] + 4], "little") & ~(1 << 31)
        assert length > HEADER_BYTES + HASH_BYTES, f"{block} is not in the format that this was written for"
        ends.append(ends[-1] + length)
    begin, end = list(pairwise(ends))[index]
    if in_header:
        data[begin] ^= 1 << 4
    else:
        data[end - HASH_BYTES - 20] ^= 1
    block.write_bytes(data)


@pytest.mark.parametrize(("where", "index"), [("header", 9), ("payload", -1)])
async def test_after_a_bit_of_the_brokers_file_flipped_the_job_is_refused_and_the_others_continue(
    tmp_path: Path, where: str, index: int
) -> None:
    """A real broker stops, one bit of its file changes, it starts again."""
    async with ConfiguredServer(store_dir=tmp_path / "store") as server:
        async with connected(server.settings) as bus:
            await provision(bus)
            for job, windows in ((OTHER, range(5)), (JOB, range(10))):
                await bus.publish(job)
                await decide(bus, await opened(bus, job), windows)
            await bus.publish(receipt((await actions(bus))[-1]))
        await server.kill()
        flip_bit(tmp_path / "store", ACTIONS.name, index, in_header=where == "header")
        await server.start()
        async with connected(server.settings) as bus:
            before = (await bus.stream_state(ACTIONS.name)).last_sequence
            async with arbitrator_here(bus) as context:
                for job, window in ((JOB, 10), (OTHER, 5), (OTHER, 6)):
                    await bus.publish(state(job, window))
                counters = context.counters
                await until(lambda: counters.get("decided", 0) >= 2 and counters.get("halted", 0) >= 1)
            assert (counters["refused_logs"], counters["halted"]) == (1, 1)
            assert [action.window for action in await actions(bus, OTHER)] == list(range(7))
            last = await bus.last(FEED.name, subjects.of("event", JOB.job))
            assert last is not None
            event = decode(Event, last.subject, last.payload)
            assert (event.signature, event.limit) == ("log-refused", 9.0)
            own = subjects.of("action", JOB.job)
            assert await bus.first(ACTIONS.name, own, start=before + 1) is None  # nothing on top


# --- after a fail-over one of several servers may answer as it did before ---

OWN = subjects.of("action", JOB.job)
NEVER = 10**9


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PAUSE_S", 0.05)
    monkeypatch.setattr(job_log, "SHOW_WAITS_S", (0.01,))


async def decided_four(bus: Bus, old: OldServer, num_old: int) -> None:
    """Four windows of JOB, the last of which the trainer has applied; the old server knows two, and tells so."""
    await bus.publish(JOB)
    log = await opened(bus)
    await decide(bus, log, range(2))
    old.answer_old(num_old, OWN, await bus.last(ACTIONS.name, OWN))
    await decide(bus, log, range(2, 4))
    await bus.publish(receipt((await actions(bus))[-1]))


async def test_a_job_whose_actions_seem_to_end_early_is_opened_once_its_leader_is_found(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile others are opened, though it has the only place for one that is opened."""
    monkeypatch.setattr(service, "MAX_OPENING", 1)
    old = OldServer(bus)
    await decided_four(bus, old, NEVER)
    await bus.publish(OTHER)
    async with arbitrator_here(old) as context:  # type: ignore[arg-type]
        await until(lambda: old.num_asked[OWN] >= 2)
        await bus.publish(state(JOB, 4))
        await bus.publish(state(OTHER, 0))
        await until(lambda: context.counters.get("decided") == 1)
        assert [action.window for action in await actions(bus, OTHER)] == [0]
        assert len(await actions(bus)) == 4, "it still waits"
        old.answer_old(0, OWN, None)
        await until(lambda: context.counters.get("decided") == 2)
        assert "halted" not in context.counters
    assert [action.window for action in await actions(bus)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("num_replicas", "least", "most"), [(1, 1, 1), (3, 3, 20)])
async def test_it_is_halted_at_once_with_one_copy_and_in_the_end_with_several(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, num_replicas: int, least: int, most: int
) -> None:
    monkeypatch.setattr(requests, "OLD_ANSWERS_S", 0.5)
    old = OldServer(bus, num_replicas)
    await decided_four(bus, old, NEVER)
    async with arbitrator_here(old) as context:  # type: ignore[arg-type]
        await until(lambda: context.counters.get("halted") == 1)
        assert context.counters["refused_logs"] == 1
        assert least <= old.num_asked[OWN] <= most


async def test_a_running_arbitrator_asks_again_for_an_action_that_another_stored(bus: Bus) -> None:
    """Its own is refused for one that the answering server does not show, and then one is shown before its own."""
    old = OldServer(bus)
    log, another = await opened(old), await opened(bus)  # type: ignore[arg-type]
    await decide(old, log, range(1))  # type: ignore[arg-type]
    old.answer_old(5, OWN, await bus.last(ACTIONS.name, OWN))
    await decide(bus, another, range(3))
    await decide(old, log, range(1, 4))  # type: ignore[arg-type]
    assert [action.window for action in await actions(bus)] == [0, 1, 2, 3]
    assert old.num_asked[OWN] > 5


@pytest.mark.parametrize("num_replicas", [3, 1])
async def test_an_action_that_an_old_server_refuses_is_published_again(bus: Bus, num_replicas: int) -> None:
    """It expects what follows an earlier action; the new leader, which answers the question, shows ours as the last."""
    old = OldServer(bus, num_replicas)
    log = await opened(old)  # type: ignore[arg-type]
    await decide(old, log, range(2))  # type: ignore[arg-type]
    old.answer_old(3, "publish_next", 1)
    if num_replicas > 1:
        await decide(old, log, range(2, 3))  # type: ignore[arg-type]
        assert [action.window for action in await actions(bus)] == [0, 1, 2]
        assert old.num_asked["publish_next"] == 4
    else:
        with pytest.raises(ActionsEndEarlyError, match="for one that it does not show: wrong last sequence: 1"):
            await decide(old, log, range(2, 3))  # type: ignore[arg-type]
        assert old.num_asked["publish_next"] == 1


async def test_states_that_were_read_are_folded_though_the_server_that_is_asked_does_not_know_them(bus: Bus) -> None:
    """The state that opens the job is not read a second time by itself: without it, nothing is decided here."""
    old = OldServer(bus)
    await bus.publish(JOB)
    async with arbitrator_here(old) as context:  # type: ignore[arg-type]
        await until(lambda: context.counters.get("ready"))
        states = subjects.of("state", JOB.job, subjects.ANY)
        old.answer_old(3, states, None)
        await bus.publish(state(JOB, 0))
        await until(lambda: context.counters.get("decided") == 1)
        assert old.num_asked[states] > 3
    assert [action.window for action in await actions(bus)] == [0]


async def test_an_end_of_feed_before_the_watermark_forgets_no_inputs(bus: Bus) -> None:
    """With several copies; a single server that says so has lost them."""
    await bus.publish(JOB)
    await decide(bus, await opened(bus), range(4))
    for num_replicas, num_warnings in ((3, 0), (1, 1)):
        old = OldServer(bus, num_replicas)
        with capture_logs() as logs:
            old.answer_old(5, FEED.name, 2)
            async with arbitrator_here(old) as context:  # type: ignore[arg-type]
                await until(lambda: context.counters.get("jobs") == 1)
        assert [one["event"] for one in logs].count("inputs after the checkpoint are gone") == num_warnings


@pytest.mark.parametrize("num_replicas", [3, 1])
async def test_a_policy_that_the_server_does_not_know_yet_is_looked_for_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, num_replicas: int
) -> None:
    choose, num_asked = PolicyStore.choose, 0

    async def old(self: PolicyStore, job: Job, recorded: Action | None) -> Policy:
        nonlocal num_asked
        num_asked += 1
        if num_asked <= 3:
            raise PolicyAbsentError("version 7 of policy 'ppo', which decided this generation so far, is gone")
        return await choose(self, job, recorded)

    monkeypatch.setattr(PolicyStore, "choose", old)
    await bus.publish(JOB)
    await bus.publish(state(JOB, 0))
    async with arbitrator_here(OldServer(bus, num_replicas)) as context:  # type: ignore[arg-type]
        expected = "decided" if num_replicas > 1 else "halted"
        await until(lambda: context.counters.get(expected) == 1)
        assert num_asked == (4 if num_replicas > 1 else 1)
