"""Everything that the bus has of a generation is read, and what is missing is counted."""

import asyncio

import pytest
from tests.support import examples
from tests.support.old_server import OldServer

from dynamix.arbitrator.learning.collecting import collect
from dynamix.runtime.bus import Bus, BusMessage, requests
from dynamix.schemas import subjects
from dynamix.schemas.messages import Applied, RankReward, Reward

NUM_WINDOWS = 1500
NO_TIME_S = 1e-9
JOB = examples.job({"node-a": (0, 1)})


async def refuse(message: BusMessage, reason: str) -> None:
    raise AssertionError((message, reason))


def reward(window: int) -> Reward:
    ranks = tuple(RankReward(rank=rank, reward=1.0, terms={}) for rank in (0, 1))
    return Reward(job=JOB.job, generation=0, window=window, node="node-a", formula="time-aware", ranks=ranks)


async def record(bus: Bus, windows: range, rewarded: range) -> None:
    for window in windows:
        await bus.publish_soon(examples.state(window_index=window))
    for window in rewarded:
        await bus.publish_soon(reward(window))
    await bus.flush()


async def test_a_long_generation_is_read_completely_with_any_grace_period(bus: Bus) -> None:
    await record(bus, range(NUM_WINDOWS), range(NUM_WINDOWS))
    await bus.publish(examples.action())
    found = await collect(bus, JOB, grace_s=NO_TIME_S, refuse=refuse)
    assert found is not None
    assert (len(found.recording.states), len(found.recording.rewards)) == (NUM_WINDOWS, NUM_WINDOWS)
    assert (len(found.recording.actions), found.num_unrewarded) == (1, 0)


async def test_the_last_rewards_are_waited_for(bus: Bus) -> None:
    await record(bus, range(5), range(3))
    reading = asyncio.create_task(collect(bus, JOB, grace_s=60, refuse=refuse))
    for window in (3, 4):
        await bus.publish(reward(window))
    found = await reading
    assert found is not None
    assert (len(found.recording.rewards), found.num_unrewarded) == (5, 0)


async def test_actions_that_were_applied_are_asked_for_again_after_a_fail_over(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PAUSE_S", 0.02)
    await record(bus, range(5), range(5))
    action = examples.action()
    await bus.publish(action)
    await bus.publish(
        Applied(
            job=JOB.job,
            generation=0,
            decided_window=action.window,
            effective_window=action.window + 2,
            effective_step=100,
            local_batch_sizes=action.local_batch_sizes,
        )
    )
    for num_replicas, num_actions in ((3, 1), (1, 0)):
        old = OldServer(bus, num_replicas)
        old.answer_old(3, subjects.of("action", JOB.job), None)
        found = await collect(old, JOB, grace_s=NO_TIME_S, refuse=refuse)  # type: ignore[arg-type]
        assert found is not None
        assert len(found.recording.actions) == num_actions


async def test_a_stopped_intake_gives_no_half_generation(bus: Bus) -> None:
    await record(bus, range(5), range(3))
    bus.stop_intake()
    assert await collect(bus, JOB, grace_s=60, refuse=refuse) is None
