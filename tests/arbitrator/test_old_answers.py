"""After a fail-over one of several servers may answer as it did before: that halts no job, unless it goes on."""

import pytest
from structlog.testing import capture_logs
from tests.arbitrator.test_job_log import JOB, OTHER, actions, decide, opened, receipt, state
from tests.support.brokers import until
from tests.support.old_server import OldServer
from tests.support.services_here import arbitrator_here

from dynamix.arbitrator import service
from dynamix.arbitrator.deciding import job_log
from dynamix.arbitrator.deciding.job_log import ActionsEndEarlyError
from dynamix.arbitrator.learned.policy_store import PolicyAbsentError, PolicyStore
from dynamix.arbitrator.policies.policy import Policy
from dynamix.runtime.bus import Bus, requests
from dynamix.schemas import subjects
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.streams import ACTIONS, FEED

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
