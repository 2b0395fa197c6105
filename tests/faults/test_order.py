"""Duplicates, late copies and reordering on the bus do not change decisions."""

import random
from collections.abc import AsyncIterator

import pytest
from tests.support.arbitrators import crew, states_of, two_node_job
from tests.support.bus_watch import watching
from tests.support.control_plane import ControlPlane, control_plane
from tests.support.decision_checks import check_decisions, recorded_states
from tests.support.faults import Figure, Scale

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.schemas import subjects
from dynamix.schemas.codec import encode, message_id
from dynamix.schemas.messages import Action, Job, State

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with control_plane() as running:
        yield running


async def publish(plane: ControlPlane, state: State, copy: int = 0) -> None:
    """A copy has an identity of its own, as one has that comes back when the broker has forgotten the first."""
    subject = subjects.of("state", state.job, state.node)
    await plane.bus.publish_bytes(subject, encode(state), f"{message_id(state)}:{copy}")


async def decide(plane: ControlPlane, job: Job, states: list[State], num_windows: int) -> list[Action]:
    """What one arbitrator makes of states in this order; a repeated one is stored again."""
    await plane.bus.publish(job)
    async with watching(plane.bus, job.job) as watch, crew(plane) as arbitrators:
        await watch.until_ready(arbitrators.start())
        for copy, state in enumerate(states):
            await publish(plane, state, copy)
        await watch.until_decided(num_windows)
    return await check_decisions(plane.bus, job, num_windows=num_windows)


def undisturbed(job: Job, feed: list[tuple[int, State]]) -> list[Action]:
    """The arbitrator's own fold over states with the places that they have in FEED: gives bytes, not only sizes."""
    fold, actions = Fold(job, policy_named(job.policy), None), []
    for sequence, state in feed:
        fold.add_state(sequence, state)
        while (action := fold.close()) is not None:
            fold.adopt(action)
            actions.append(action)
    return actions


async def test_duplicates_give_identical_bytes(
    plane: ControlPlane, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    """A third comes twice or more, at once or up to 30 windows late; compared with the same record without them."""
    num_windows, job = scale(60, 300), two_node_job()
    placed = [(float(place), state) for place, state in enumerate(s for w in range(num_windows) for s in states_of(w))]
    copies = [
        (place + chance.choice([0.1, 1.1, 7.1, 60.1]), state) for place, state in placed if chance.random() < 0.35
    ]
    states = [state for _, state in sorted(placed + copies, key=lambda item: item[0])]
    stored = await decide(plane, job, states, num_windows)
    first: dict[tuple[str, int], tuple[int, State]] = {}
    for sequence, state in await recorded_states(plane.bus, job):
        first.setdefault((state.node, state.window), (sequence, state))
    clean = undisturbed(job, sorted(first.values(), key=lambda item: item[0]))
    assert [encode(action) for action in stored] == [encode(action) for action in clean]
    figure("duplicates", len(copies))


async def test_reordering_inside_a_window_gives_identical_sizes(
    plane: ControlPlane, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    """Any node may be first, and a node may be a window ahead of another."""
    num_windows, job = scale(60, 300), two_node_job()
    states = [state for window in range(num_windows) for state in states_of(window)]
    ahead = {node: chance.random() < 0.5 for node in ("node-a", "node-b")}
    shuffled = sorted(states, key=lambda s: (s.window - ahead[s.node] * (s.window % 3 == 2), chance.random()))
    assert shuffled != states
    stored = await decide(plane, job, shuffled, num_windows)
    clean = undisturbed(job, list(enumerate(states, start=1)))
    assert [action.local_batch_sizes for action in stored] == [action.local_batch_sizes for action in clean]
    figure("moved", sum(was is not now for was, now in zip(states, shuffled, strict=True)))
