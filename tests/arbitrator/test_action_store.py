"""Stored actions are checked against their hashes, the trainer's receipts and what was known before."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from tests.support import examples
from tests.support.brokers import ConfiguredServer, connected, operate, until
from tests.support.services_here import arbitrator_here
from tests.support.stored_blocks import BlockRecord, block_of, flip_in_header, flip_in_payload, records

from dynamix.arbitrator.deciding import job_log
from dynamix.arbitrator.deciding.action_store import ActionStoreError
from dynamix.arbitrator.deciding.job_log import JobLog, Surroundings
from dynamix.arbitrator.families.source import ProfileSource
from dynamix.arbitrator.learned.policy_source import PolicySource
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.runtime.bus import Bus, BusMessage, StaleWriterError
from dynamix.runtime.bus.provision import provision
from dynamix.schemas import subjects
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Applied, Event, Job, State
from dynamix.schemas.streams import ACTIONS, FEED

NODES: dict[str, tuple[int, ...]] = {"node-a": (0, 1)}
JOB = examples.job(NODES, job="first-0", policy="static")
OTHER = examples.job(NODES, job="other-0", policy="static")
SIZES = (128, 128)


async def opened(bus: Bus, job: Job = JOB, known: Any = None) -> JobLog:
    """A job's log as an arbitrator that has just started opens it."""
    log = structlog.stdlib.get_logger()
    around = Surroundings(
        bus, PolicySource(PolicyStore(bus)), ProfileSource(bus, log, lambda _: None), log, lambda _: None
    )
    return await JobLog.open(job, around, known)


def state(job: Job, window: int) -> State:
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
    """What the trainer says once all ranks have adopted it."""
    fields = {
        "job": action.job,
        "generation": action.generation,
        "decided_window": action.window,
        "effective_window": action.window + 2,
        "effective_step": 10 * (action.window + 2),
        "local_batch_sizes": action.local_batch_sizes,
        "action_hash": action.hash,
    }
    return Applied(**(fields | changes))


async def test_an_action_with_another_hash_than_its_contents_is_refused(bus: Bus) -> None:
    sealed = seal(examples.action(3, job=JOB.job, local_batch_sizes=SIZES, deltas=(0, 0)), b"p" * 32)
    forged = msgspec.structs.replace(sealed, local_batch_sizes=(32, 1024))
    await bus.publish_next(forged, expected_last=0)
    with pytest.raises(
        ActionStoreError, match=r"action\.first\.0 at 1 is not as it was written: its hash does not match its content"
    ):
        await opened(bus)


@pytest.mark.parametrize("lag", [0, 1, 2])
async def test_a_log_that_holds_what_the_trainer_applied_is_believed(bus: Bus, lag: int) -> None:
    await decide(bus, await opened(bus), range(4))
    await bus.publish(receipt((await actions(bus))[3 - lag]))
    await decide(bus, await opened(bus), range(4, 6))
    assert [action.window for action in await actions(bus)] == list(range(6))


async def test_a_log_that_ends_before_what_the_trainer_applied_is_refused(bus: Bus) -> None:
    await decide(bus, await opened(bus), range(4))
    last = (await actions(bus))[-1]
    await bus.publish(receipt(last, decided_window=7))
    with pytest.raises(ActionStoreError, match=r"ends at 4 \(window 3 .*applied an action for window 7") as caught:
        await opened(bus)
    assert (caught.value.window, caught.value.known_window) == (3, 7)


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
    assert len(reads) >= 2
    assert log.known is not None
    assert log.known.action.window == 2


async def test_a_log_with_another_action_than_the_one_applied_is_refused(bus: Bus) -> None:
    await decide(bus, await opened(bus), range(2))
    await bus.publish(receipt((await actions(bus))[1], action_hash=b"h" * 32))
    with pytest.raises(
        ActionStoreError, match="is not the action for window 1 of generation 0 that the trainer applied"
    ):
        await opened(bus)


async def test_an_empty_log_of_a_job_that_has_applied_actions_is_refused(bus: Bus) -> None:
    await bus.publish(receipt(seal(examples.action(5, job=JOB.job), b"")))
    with pytest.raises(ActionStoreError, match="ends at nothing, but the trainer applied an action for window 5"):
        await opened(bus)


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


async def test_a_running_arbitrator_refuses_actions_that_were_stored_again_from_the_start(bus: Bus) -> None:
    log = await opened(bus)
    await decide(bus, log, range(3))
    await operate(bus, "STREAM.DELETE.ACTIONS")
    await provision(bus)
    with pytest.raises(ActionStoreError, match="ends at nothing, before our own 3") as caught:
        await decide(bus, log, range(3, 4))
    assert (caught.value.window, caught.value.known_window) == (-1, 2)
    assert await actions(bus) == []


async def test_a_chain_broken_in_between_is_refused(bus: Bus) -> None:
    log = await opened(bus)
    await decide(bus, log, range(2))
    options = {"job": JOB.job, "local_batch_sizes": SIZES, "deltas": (0, 0)}
    third = seal(examples.action(2, **options), (await actions(bus))[-1].hash)
    fourth = seal(examples.action(3, **options), b"x" * 32)
    sequence = await bus.publish_next(third, expected_last=2)
    await bus.publish_next(fourth, expected_last=sequence)
    with pytest.raises(ActionStoreError, match="breaks the chain: the action for window 3 of generation 0 does"):
        await decide(bus, log, range(2, 3))


class TestRot:
    """A real broker stops, one bit of its file changes, it starts again."""

    @pytest.fixture
    async def server(self, tmp_path: Path) -> Any:
        async with ConfiguredServer(store_dir=tmp_path / "store") as running:
            yield running

    async def fill(self, bus: Bus) -> None:
        """OTHER's five actions, then ten of JOB's; the trainer has applied the last of them."""
        for job, windows in ((OTHER, range(5)), (JOB, range(10))):
            await bus.publish(job)
            await decide(bus, await opened(bus, job), windows)
        await bus.publish(receipt((await actions(bus))[-1]))

    def rot(self, tmp_path: Path, where: str, index: int) -> BlockRecord:
        block = block_of(tmp_path / "store", ACTIONS.name)
        record = records(block)[index]
        {"header": flip_in_header, "payload": flip_in_payload}[where](block, record)
        return record

    @pytest.mark.parametrize(("where", "index"), [("header", 9), ("payload", -1)])
    async def test_after_a_restart_of_both_the_job_is_refused_and_the_others_continue(
        self, server: ConfiguredServer, tmp_path: Path, where: str, index: int
    ) -> None:
        async with connected(server.settings) as bus:
            await provision(bus)
            await self.fill(bus)
        await server.kill()
        self.rot(tmp_path, where, index)
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
            assert (
                await bus.first(ACTIONS.name, subjects.of("action", JOB.job), start=before + 1) is None
            )  # nothing on top

    @pytest.mark.parametrize(("where", "index"), [("header", 9), ("payload", -1)])
    async def test_an_arbitrator_that_ran_all_the_while_refuses_it_too(
        self, server: ConfiguredServer, tmp_path: Path, where: str, index: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_log, "SHOW_WAITS_S", (0.01, 0.01))
        async with connected(server.settings) as bus:
            await provision(bus)
            others, log = await opened(bus, OTHER), await opened(bus)
            await decide(bus, others, range(5))
            await decide(bus, log, range(10))
            await server.stop()
            self.rot(tmp_path, where, index)
            await server.start()
            with pytest.raises(ActionStoreError, match="before our own 15"):
                await decide(bus, log, range(10, 11))
            await decide(bus, others, range(5, 7))
            assert [action.window for action in await actions(bus, OTHER)] == list(range(7))


class _ShowsNothing:
    """A broker that refuses an action for one that it does not show; the real one does so for moments only."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.num_refused = 0

    async def publish_next(self, action: Action, *, expected_last: int) -> int:  # noqa: ARG002 - as it is called
        self.num_refused += 1
        raise StaleWriterError("wrong last sequence: 25", 25)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


async def test_a_broker_that_refuses_for_what_it_does_not_show_ends_the_tries(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "SHOW_WAITS_S", (0.01, 0.01))
    broken = _ShowsNothing(bus)
    log = await opened(broken)  # type: ignore[arg-type]
    with pytest.raises(ActionStoreError, match="for one that it does not show: wrong last sequence: 25"):
        await decide(bus, log, range(1))
    assert broken.num_refused == 1


async def test_a_receipt_far_beyond_what_was_reported_halts_no_job(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """Any trainer may publish one; within reach of the newest report it still counts."""
    await decide(bus, await opened(bus), range(3))
    newest = (await actions(bus))[-1]
    await bus.publish(msgspec.structs.replace(receipt(newest), decided_window=1 << 40, effective_window=(1 << 40) + 2))
    await decide(bus, await opened(bus), range(3, 5))
    assert [action.window for action in await actions(bus)] == [0, 1, 2, 3, 4]
    assert "far beyond what its ranks reported: made up" in caplog.text
    await bus.publish(msgspec.structs.replace(receipt(newest), decided_window=60, effective_window=62))
    with pytest.raises(ActionStoreError, match="but the trainer applied an action for window 60"):
        await opened(bus)
