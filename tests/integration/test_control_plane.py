"""Real services and a real broker, fed by a synthetic trainer."""

import hashlib

import pytest
from tests.support import examples
from tests.support.control_plane import ControlPlane, control_plane, one_node_job, report_of

from dynamix.runtime.bus import StaleWriterError
from dynamix.schemas import subjects
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import encode
from dynamix.schemas.messages import Dead, MetricWindow, Reward, State
from dynamix.schemas.streams import ACTIONS, DEAD, FEED

SPEEDS = (3000.0, 3000.0, 3000.0, 1000.0)


async def test_one_report_becomes_a_window_a_state_a_reward_and_an_action() -> None:
    async with control_plane("collector", "reward", "arbitrator") as plane:
        job = one_node_job()
        await plane.bus.publish(job)
        for window in range(2):
            await plane.bus.publish(report_of(job, window, (128,) * 4, SPEEDS))
            actions = await plane.wait_for_actions(window + 1)
        assert actions[0].local_batch_sizes == (154, 154, 153, 51)
        assert actions[0].deltas == (26, 26, 25, -77)
        assert [action.window for action in actions] == [0, 1]
        windows = await plane.wait_for(FEED.name, subjects.of("window", examples.JOB, "*"), 2)
        states = await plane.wait_for(FEED.name, subjects.of("state", examples.JOB, "*"), 2)
        rewards = await plane.wait_for(FEED.name, subjects.of("reward", examples.JOB, "*"), 2)
        _check_window(windows[1])
        assert isinstance(states[0], State)
        assert isinstance(rewards[0], Reward)
        assert rewards[0].formula == "paper-sgd"
        assert rewards[0].ranks[0].terms["accuracy"] == 0.75


def _check_window(window: object) -> None:
    """The second window: counters have a predecessor, and this very process was believed and read."""
    assert isinstance(window, MetricWindow)
    assert window.probe == "tcp_info"
    assert window.refused_pids == ()
    rank = window.ranks[0]
    assert rank.network is not None
    assert rank.network.tx_bytes == 1000
    assert rank.system.cpu_time_ratio is not None
    assert rank.system.memory_bytes is not None
    assert rank.system.memory_bytes > 1 << 20


async def test_windows_with_late_kernel_counters_are_masked_and_counted() -> None:
    async with control_plane("collector") as plane:
        job = one_node_job(policy="static")
        for number, window in enumerate((0, 1, 5, 2**40), start=1):
            await plane.bus.publish(report_of(job, window, (128,) * 4, SPEEDS))
            await plane.wait_for(FEED.name, subjects.of("window", examples.JOB, "*"), number)
        windows = await plane.wait_for(FEED.name, subjects.of("window", examples.JOB, "*"), 4)
        told = [(w.ranks[0].system.cpu_time_ratio is not None, w.num_readings_lost) for w in windows]  # type: ignore[attr-defined]
        assert told == [(False, 0), (True, 0), (False, 1), (False, 2)]


async def test_unusable_messages_go_to_dead_with_a_reason() -> None:
    async with control_plane("collector", "reward", "arbitrator") as plane:
        job = one_node_job(policy="static")
        await plane.bus.publish(job)
        await _publish_rubbish(plane)
        await plane.bus.publish(report_of(job, 0, (128,) * 4, SPEEDS))
        assert len(await plane.wait_for_actions(1)) == 1
        letters = await plane.wait_for(DEAD.name, f"{subjects.ROOT}.dead.>", 5)
        reasons = {(letter.service, letter.reason.split(":")[0]) for letter in letters if isinstance(letter, Dead)}
        assert {service for service, _ in reasons} == {"collector", "reward", "arbitrator"}
        text = " | ".join(letter.reason for letter in letters if isinstance(letter, Dead))
        for part in (
            "does not begin with DX",
            "carries the identity",
            "not in the job's specification",
            "has no specification",
        ):
            assert part in text
        assert all(service.exit_code() is None for service in plane.services.values())


async def _publish_rubbish(plane: ControlPlane) -> None:
    async def put(subject: str, payload: bytes) -> None:
        await plane.bus.publish_bytes(subject, payload, hashlib.sha256(payload).hexdigest())

    await put(subjects.of("report", examples.JOB, "node-a"), b"\x00\xff random")
    await put(subjects.of("window", examples.JOB, "node-a"), b"not ours")
    await put(
        subjects.of("state", examples.JOB, "node-a"), encode(examples.state("node-b", (2, 3)))
    )  # says it is node-b's
    await put(
        subjects.of("state", examples.JOB, "node-c"), encode(examples.state("node-c", (0, 1)))
    )  # a node the job does not have
    await put(
        subjects.of("state", examples.JOB, "node-a"), encode(examples.state("node-a", (0, 1, 2, 3), generation=5))
    )


async def test_a_job_with_an_unknown_policy_is_not_decided_and_others_are() -> None:
    async with control_plane("collector", "arbitrator") as plane:
        for job in (one_node_job(job="odd-00000000", policy="astrology"), one_node_job()):
            await plane.bus.publish(job)
            await plane.bus.publish(report_of(job, 0, (128,) * 4, SPEEDS))
        assert len(await plane.wait_for_actions(1)) == 1
        assert await plane.actions("odd-00000000") == []
        assert plane.services["arbitrator"].exit_code() is None


async def test_a_new_generation_is_decided_from_window_zero_and_continues_the_chain() -> None:
    async with control_plane("collector", "arbitrator") as plane:
        first = one_node_job()
        await plane.bus.publish(first)
        await plane.bus.publish(report_of(first, 0, (128,) * 4, SPEEDS))
        await plane.wait_for_actions(1)
        second = one_node_job(generation=1, initial_local_batch_sizes=(154, 154, 153, 51))
        await plane.bus.publish(second)
        await plane.bus.publish(report_of(second, 0, (154, 154, 153, 51), SPEEDS))
        old, new = await plane.wait_for_actions(2)
        assert (new.generation, new.window, new.previous_hash) == (1, 0, old.hash)
        assert new.deltas == (0, 0, 0, 0)


async def test_the_broker_refuses_a_stale_writer() -> None:
    async with control_plane() as plane:
        first = await plane.bus.publish_action(seal(examples.action(0), b""), expected_last=0)
        await plane.bus.publish_action(seal(examples.action(1), b""), expected_last=first)
        with pytest.raises(StaleWriterError):
            await plane.bus.publish_action(seal(examples.action(1, policy="other"), b""), expected_last=first)
        stored = await plane.messages(ACTIONS.name, subjects.of("action", examples.JOB))
        assert len(stored) == 2
