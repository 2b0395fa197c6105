"""The learner: which generations are over, what is read of them, and what an update makes of it."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import structlog
from tests.support import examples, learned
from tests.support.old_server import OldServer

from dynamix.arbitrator.learned.policy_file import PolicyFile, UpdateStats
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.arbitrator.learning import service
from dynamix.arbitrator.learning.rollout import Recording
from dynamix.arbitrator.learning.service import LearnerSettings, Outcome, _Learner, collect, ended_by, update
from dynamix.runtime.bus import Bus, BusMessage, requests
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.messages import Job, Reward

FIRST = learned.policy_file(seeds=(1,))
NEXT = [learned.policy_file(seeds=(seed,)).to_bytes() for seed in range(2, 5)]
NO_TIME_S = 1e-9
STATS = UpdateStats(**dict.fromkeys(UpdateStats.__struct_fields__, 0.5))


def job_of(generation: int = 0, phase: str = "running", **changes: Any) -> Job:
    fields: dict[str, Any] = {"policy": "ppo", "policy_options": {"explore": 1.0}}
    return examples.job({"node-a": (0, 1)}, generation=generation, phase=phase, **(fields | changes))


def reward_of(window: int, generation: int = 0, formula: str = "time-aware") -> Reward:
    return examples.reward("node-a", (0, 1), window, generation=generation, formula=formula)


def test_a_generation_is_over_with_its_end_or_with_the_next_one() -> None:
    running: dict[str, Job] = {}

    def over(job: Job) -> list[tuple[Job, bool]]:
        return ended_by(job, running, "ppo", "mnist-*")

    first, ended = job_of(job="mnist-1"), job_of(2, "ended", job="mnist-1", end_reason="completed")
    assert over(first) == []
    second = job_of(1, job="mnist-1")
    assert over(second) == [(first, False)]
    assert over(second) == over(first) == []
    assert over(ended) == [(second, False), (ended, True)]
    broken = job_of(0, "ended", job="mnist-2", end_reason="RuntimeError: out of memory")
    assert over(broken) == [(broken, False)]
    for changes in ({"policy_options": {}}, {"policy": "rule"}, {"job": "cifar-1"}):
        assert over(job_of(0, "ended", **({"job": "mnist-3"} | changes))) == []


async def refuse(message: BusMessage, reason: str) -> None:
    raise AssertionError((message, reason))


async def record(bus: Bus, num_windows: int, num_rewarded: int) -> None:
    for window in range(num_windows):
        await bus.publish_soon(examples.state(window_index=window))
    for window in range(num_rewarded):
        await bus.publish_soon(reward_of(window))
    await bus.flush()


async def test_a_long_generation_is_read_completely_and_its_last_rewards_are_waited_for(bus: Bus) -> None:
    await record(bus, 1500, 1498)
    await bus.publish(examples.action())
    early = await collect(bus, job_of(), grace_s=NO_TIME_S, refuse=refuse)
    assert early is not None
    assert (len(early.states), len(early.rewards), len(early.actions), early.num_unrewarded) == (1500, 1498, 1, 2)
    reading = asyncio.create_task(collect(bus, job_of(), grace_s=60, refuse=refuse))
    for window in (1498, 1499):
        await bus.publish(reward_of(window))
    found = await reading
    assert found is not None
    assert (len(found.rewards), found.num_unrewarded) == (1500, 0)


async def test_actions_that_were_applied_are_asked_for_again_after_a_fail_over(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PAUSE_S", 0.02)
    await record(bus, 5, 5)
    await bus.publish(examples.action())
    await bus.publish(examples.applied(0, 2))
    for num_replicas, num_actions in ((3, 1), (1, 0)):
        old = OldServer(bus, num_replicas)
        old.answer_old(3, subjects.of("action", examples.JOB), None)
        found = await collect(old, job_of(), grace_s=NO_TIME_S, refuse=refuse)  # type: ignore[arg-type]
        assert found is not None
        assert len(found.actions) == num_actions


async def test_a_stopped_intake_gives_no_half_generation(bus: Bus) -> None:
    await record(bus, 5, 3)
    bus.stop_intake()
    assert await collect(bus, job_of(), grace_s=60, refuse=refuse) is None


class Updates:
    """Replaces learning: records the lessons and returns the next made-up version."""

    def __init__(self) -> None:
        self.lessons: list[list[tuple[Recording, bool]]] = []

    def __call__(self, content: bytes, lessons: Sequence[tuple[Recording, bool]]) -> Outcome:
        assert PolicyFile.from_bytes(content)
        self.lessons.append(list(lessons))
        return Outcome(NEXT[len(self.lessons)], [], (1.0,), STATS)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Updates:
    noted = Updates()
    monkeypatch.setattr(service, "update", noted)
    return noted


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def collected(*formulas: str, generation: int = 0, num_states: int = 0) -> Recording:
    states = [(window, examples.state(window_index=window)) for window in range(num_states)]
    rewards = [reward_of(window, generation, formula) for window, formula in enumerate(formulas)]
    return Recording(job_of(generation, policy="mine"), states, [examples.action(generation=generation)], [], rewards)


async def over(learner: _Learner, found: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation is over, of which the bus holds this."""

    async def collect(*_: object, **__: object) -> Recording:
        return found

    monkeypatch.setattr(service, "collect", collect)
    await learner.learn_from(found.job, terminated=True)


async def test_rewards_of_another_formula_are_left_out_and_missing_ones_cut_a_generation_off(
    bus: Bus, updates: Updates, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await PolicyStore(bus).put("mine", FIRST.to_bytes())
    chosen = LearnerSettings(policy="mine", generations_per_update=1)
    context = Context("learner", "0", "here", bus, chosen, asyncio.Event(), structlog.get_logger())
    learner = _Learner(context, executor)
    await learner.start()
    await over(learner, collected("time-aware", "paper-sgd"), monkeypatch)
    assert updates.lessons == []
    assert context.counters["generations_of_other_rewards"] == context.counters["generations_left_out"] == 1
    await over(learner, collected("time-aware", generation=1, num_states=3), monkeypatch)
    await over(learner, collected("time-aware", generation=2), monkeypatch)
    assert [terminated for lessons in updates.lessons for _, terminated in lessons] == [False, True]
    assert context.counters["generations_without_last_rewards"] == 1


def test_an_update_names_its_generations_and_is_refused_in_numbers_that_are_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = learned.policy_file(reward_weights={"beta": 1.0})
    monkeypatch.setattr(service, "trajectory_of", lambda *_, **__: learned.trajectory(file.metadata))
    lessons = [(collected("time-aware"), True)]
    outcome = update(file.to_bytes(), lessons)
    assert outcome.content is not None
    metadata = PolicyFile.from_bytes(outcome.content).metadata
    assert (metadata.reward_weights, metadata.learned_from, metadata.parent) == (
        {},
        (f"{examples.JOB}:0",),
        file.digest,
    )
    for learning_rate in (1e37, 1e39):
        hasty = learned.policy_file(settings=msgspec.structs.replace(learned.SMALL, learning_rate=learning_rate))
        outcome = update(hasty.to_bytes(), lessons)
        assert outcome.content is None
        assert outcome.refused[0].startswith(f"{examples.JOB}:0: ")
