"""The learner's shell in this process: what it learns from, and what it does when the bus refuses."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import structlog
from tests.support import examples, learned, trained_policies

from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.arbitrator.learning import service, updating
from dynamix.arbitrator.learning.collecting import Collected, Finished
from dynamix.arbitrator.learning.rollout import Recording
from dynamix.arbitrator.learning.service import LearnerSettings, _Learner
from dynamix.arbitrator.learning.updating import Lesson, Outcome
from dynamix.runtime.bus import Bus, PermissionDeniedError, PublishError
from dynamix.runtime.service import Context
from dynamix.schemas.messages import RankReward, Reward

FIRST = learned.policy_file(seeds=(1,))
NEXT = [learned.policy_file(seeds=(seed,)).to_bytes() for seed in range(2, 9)]


def recording(*formulas: str, **changes: Any) -> Recording:
    job = examples.job(policy="mine", **changes)
    ranks = (RankReward(rank=0, reward=1.0, terms={}),)
    found = [
        Reward(job=job.job, generation=job.generation, window=window, node="node-a", formula=formula, ranks=ranks)
        for window, formula in enumerate(formulas)
    ]
    return Recording(job, [], [examples.action(generation=job.generation)], [], found)


class Updates:
    """Replaces learning: records the lessons and returns the next made-up version."""

    def __init__(self) -> None:
        self.lessons: list[list[Lesson]] = []

    def __call__(self, content: bytes, lessons: Sequence[Lesson]) -> Outcome:
        assert PolicyFile.from_bytes(content)
        self.lessons.append(list(lessons))
        return Outcome(NEXT[len(self.lessons)], [1.0], 0.5, 0.0, [])


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Updates:
    noted = Updates()
    monkeypatch.setattr(updating, "update", noted)
    return noted


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


async def a_learner(bus: Bus, executor: Any, **settings: Any) -> tuple[_Learner, Context[LearnerSettings]]:
    await PolicyStore(bus).put("mine", FIRST.to_bytes())
    chosen = LearnerSettings(policy="mine", generations_per_update=1, **settings)
    context = Context("learner", "0", "here", bus, chosen, asyncio.Event(), structlog.get_logger())
    learner = _Learner(context, executor)
    await learner._start()
    return learner, context


async def over(learner: _Learner, found: Recording, monkeypatch: pytest.MonkeyPatch, num_unrewarded: int = 0) -> None:
    """A generation is over, of which the bus holds this."""

    async def collect(*_: object, **__: object) -> Collected:
        return Collected(found, num_unrewarded)

    monkeypatch.setattr(service, "collect", collect)
    await learner._on_finished(Finished(found.job, terminated=True))


@pytest.mark.parametrize("formulas", [("paper-sgd",), ("time-aware", "paper-sgd")])
async def test_rewards_of_another_formula_are_left_out_unless_they_are_asked_for(
    bus: Bus,
    updates: Updates,
    executor: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    formulas: tuple[str, ...],
) -> None:
    learner, context = await a_learner(bus, executor)
    await over(learner, recording(*formulas), monkeypatch)
    assert updates.lessons == []
    assert context.counters["generations_of_other_rewards"] == context.counters["generations_left_out"] == 1
    await over(learner, recording("time-aware", generation=1), monkeypatch)
    assert len(updates.lessons) == 1

    learner, _ = await a_learner(bus, executor, rewards="any", max_staleness=9)
    await over(learner, recording(*formulas), monkeypatch)
    assert len(updates.lessons) == 2


async def test_a_generation_without_its_last_rewards_is_taken_as_cut_off(
    bus: Bus, updates: Updates, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, context = await a_learner(bus, executor)
    await over(learner, recording("time-aware"), monkeypatch, num_unrewarded=3)
    await over(learner, recording("time-aware", generation=1), monkeypatch)
    assert [lesson.terminated for lessons in updates.lessons for lesson in lessons] == [False, True]
    assert context.counters["generations_without_last_rewards"] == 1


async def test_a_version_that_the_bus_refuses_is_kept_and_so_are_later_lessons(
    bus: Bus, updates: Updates, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, context = await a_learner(bus, executor)
    put = bus.publish_next

    async def refuse(*_: object, **__: object) -> None:
        raise PublishError("maximum bytes exceeded")

    monkeypatch.setattr(bus, "publish_next", refuse)
    for generation in range(6):
        await over(learner, recording("time-aware", generation=generation), monkeypatch)
    assert (len(updates.lessons), context.counters["updates_refused"]) == (1, 6)
    assert [lesson.name.rpartition(":")[2] for lesson in learner._lessons] == ["2", "3", "4", "5"]

    monkeypatch.setattr(bus, "publish_next", put)
    await over(learner, recording("time-aware", generation=6), monkeypatch)
    assert [len(lessons) for lessons in updates.lessons] == [1, 5]
    assert [stored.version for stored in await PolicyStore(bus).versions("mine")] == [3, 2, 1]
    assert (await PolicyStore(bus).get("mine", 2)).data == NEXT[1]
    assert context.counters["updates"] == 2


async def test_an_error_that_retrying_cannot_fix_ends_the_learner(
    bus: Bus, updates: Updates, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, _ = await a_learner(bus, executor)

    async def deny(*_: object, **__: object) -> None:
        raise PermissionDeniedError("not yours")

    monkeypatch.setattr(bus, "publish_next", deny)
    with pytest.raises(PermissionDeniedError):
        await over(learner, recording("time-aware"), monkeypatch)
    assert len(updates.lessons) == 1


def test_a_version_names_the_reward_formulas_of_its_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    file = learned.policy_file(reward_weights={"beta": 1.0})
    monkeypatch.setattr(updating, "trajectory_of", lambda *_: trained_policies.trajectory(file.metadata))
    lessons = [Lesson("job:0", recording("time-aware"), terminated=True)]
    outcome = updating.update(file.to_bytes(), lessons)
    assert outcome.content is not None
    metadata = PolicyFile.from_bytes(outcome.content).metadata
    assert (metadata.reward_formula, metadata.reward_weights, metadata.learned_from) == ("time-aware", {}, ("job:0",))


@pytest.mark.parametrize("learning_rate", [1e37, 1e39])
def test_an_update_in_numbers_that_are_too_large_is_refused(
    monkeypatch: pytest.MonkeyPatch, learning_rate: float
) -> None:
    hasty = msgspec.structs.replace(learned.SMALL, learning_rate=learning_rate)
    file = learned.agent(settings=hasty).file()
    monkeypatch.setattr(updating, "trajectory_of", lambda *_: trained_policies.trajectory(file.metadata))
    outcome = updating.update(file.to_bytes(), [Lesson("job:0", recording("time-aware"), terminated=True)])
    assert outcome.content is None
    assert outcome.refused[0].startswith("job:0: ")
