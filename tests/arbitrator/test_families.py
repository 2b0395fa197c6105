"""Profiles of job families on a real bus: stored once per end, begun with, and ignored with one warning."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.arbitrator.test_job_log import opened
from tests.support import examples
from tests.support.arbitrators import stored_actions
from tests.support.brokers import until
from tests.support.old_server import OldServer
from tests.support.services_here import context_of, services_here
from tests.support.toy_cluster import ToyCluster

from dynamix.arbitrator.deciding.job_log import store_profiles
from dynamix.arbitrator.policies.rule import Rule
from dynamix.runtime.bus import Bus, requests
from dynamix.schemas import subjects
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import decode, encode
from dynamix.schemas.messages import Action, Job, JobProfile
from dynamix.schemas.streams import JOBS, PROFILES

FAMILY = "mnist-0a1b2c3d"
JOB = examples.job({"node-a": (0, 1)}, policy="rule", family=FAMILY)
PROFILE = subjects.of("profile", FAMILY)


def last_action(job: Job = JOB) -> Action:
    """The last action of a run of 12 windows."""
    decisions = ToyCluster(np.array([4000.0, 1000.0])).run(Rule(), job, 12)
    sizes, carry = decisions[-1].allocation.local_batch_sizes, decisions[-1].carry
    changes = {"job": job.job, "local_batch_sizes": sizes, "deltas": (0, 0), "carry": carry, "policy": "rule"}
    return seal(examples.action(11, policy_version=Rule.version, **changes), b"")


async def end(bus: Bus, job: Job) -> None:
    """A run that was decided, and is over."""
    await bus.publish_next(last_action(job), expected_last=0)
    await bus.publish(msgspec.structs.replace(job, phase="ended", end_reason="completed"))


@contextlib.asynccontextmanager
async def following(bus: Bus, counts: Counter[str]) -> AsyncIterator[None]:
    """An arbitrator's keeper of profiles."""
    task = asyncio.create_task(store_profiles(context_of(bus, counts)))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def newest(bus: Bus) -> JobProfile | None:
    message = await bus.last(PROFILES.name, subjects.of("profile", FAMILY))
    return None if message is None else decode(JobProfile, message.subject, message.payload)


async def until_run(bus: Bus, number: int) -> JobProfile:
    async with asyncio.timeout(30):
        while (found := await newest(bus)) is None or found.run < number:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)
    return found


async def test_each_end_is_stored_once_by_whichever_arbitrator_comes_first(bus: Bus) -> None:
    counts = Counter[str]()
    async with following(bus, counts), following(bus, counts):
        await end(bus, JOB)
        assert (await until_run(bus, 1)).job == JOB.job
        second = msgspec.structs.replace(JOB, job="mnist-99999999")
        await end(bus, second)
        found = await until_run(bus, 2)
    assert (found.job, found.run, found.world_size) == (second.job, 2, 2)
    assert (await bus.stream_state(PROFILES.name)).last_sequence == 2
    async with following(bus, counts):  # a restart looks at all ends again, one of a third run among them
        await end(bus, msgspec.structs.replace(JOB, job="mnist-88888888"))
        assert (await until_run(bus, 3)).job == "mnist-88888888"
    assert (await bus.stream_state(PROFILES.name)).last_sequence == 3


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PAUSE_S", 0.02)


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("num_replicas", [3, 1])
async def test_a_run_is_kept_with_all_windows_that_the_trainer_applied(bus: Bus, num_replicas: int) -> None:
    old, decided = OldServer(bus, num_replicas), last_action()
    sizes = decided.local_batch_sizes
    await bus.publish(examples.applied(11, 13, local_batch_sizes=sizes, action_hash=decided.hash))
    old.answer_old(3, subjects.of("action", JOB.job), None)
    with capture_logs() as logs:
        async with following(old, Counter()):  # type: ignore[arg-type]
            await end(bus, JOB)
            if num_replicas > 1:
                assert (await until_run(bus, 1)).num_windows == 12
            else:
                await until(lambda: any(one["event"] == "what the run taught is not stored" for one in logs))


async def test_a_forgotten_family_stays_forgotten_and_its_next_run_is_the_first(bus: Bus) -> None:
    counts: Counter[str] = Counter()
    await end(bus, JOB)
    async with following(bus, counts):
        await until_run(bus, 1)
    sequence = (await bus.stream_state(JOBS.name)).last_sequence
    stored = await bus.last(PROFILES.name, PROFILE)
    assert stored is not None
    await bus.publish_next(JobProfile.forgotten(FAMILY, sequence), expected_last=stored.sequence)
    assert await bus.purge(PROFILES.name, PROFILE, keep=1) == 1
    later = msgspec.structs.replace(JOB, job="later-0")
    async with following(bus, counts):
        opened_log = await opened(bus, later, counts)
        assert not opened_log.has_inputs
        assert counts["begun_with_profile"] == 0
        await end(bus, later)
        await until(lambda: counts["profiles_stored"] == 2)
    found = await newest(bus)
    assert found is not None
    assert (found.job, found.run, found.is_forgotten) == ("later-0", 1, False)


async def test_an_action_that_its_policy_cannot_read_costs_one_profile_and_no_later_one(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(bus, Counter()):
        with capture_logs() as logs, monkeypatch.context() as patch:
            patch.setattr(Rule, "profile_after", lambda *_, **__: 1 / 0)
            await end(bus, JOB)
            await until(lambda: any(one["log_level"] == "error" for one in logs))
        assert "ZeroDivisionError" in next(one["reason"] for one in logs if one["log_level"] == "error")
        await end(bus, msgspec.structs.replace(JOB, job="mnist-99999999"))
        assert (await until_run(bus, 1)).job == "mnist-99999999"


async def test_a_broken_profile_is_not_used_but_replaced(bus: Bus) -> None:
    await bus.publish_bytes(PROFILE, b"no profile", "by hand")
    with capture_logs() as logs:
        log = await opened(bus, JOB)
    assert log.fold._carry == b""
    assert "cannot be read" in next(one["reason"] for one in logs if one["log_level"] == "warning")
    counts = Counter[str]()
    async with following(bus, counts):
        await end(bus, JOB)
        await until(lambda: counts["profiles_stored"] == 1)
    assert (await until_run(bus, 1)).job == JOB.job


async def test_a_service_keeps_what_a_run_taught_and_gives_it_to_the_next(bus: Bus) -> None:
    profile: JobProfile | None = None
    async with services_here(bus, "arbitrator"):
        for number, name in enumerate(("mnist-11111111", "mnist-22222222"), start=1):
            job = msgspec.structs.replace(JOB, job=name)
            await bus.publish(job)
            for window in range(6):
                state = examples.state(window_index=window, throughput=(3000.0, 1000.0))
                await bus.publish(msgspec.structs.replace(state, job=name))
            actions = await stored_actions(bus, name, 6)
            assert actions[0].profile == (b"" if profile is None else encode(profile))
            assert not any(action.profile for action in actions[1:])
            await bus.publish(msgspec.structs.replace(job, phase="ended", end_reason="completed"))
            profile = await until_run(bus, number)
            assert (profile.job, profile.num_windows, bool(profile.memory)) == (name, 6, True)
