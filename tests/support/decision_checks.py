"""The comparison that ends a fault test: stored actions with the reference fold of what FEED recorded."""

import contextlib
import itertools

from tests.support.bus_watch import stored_messages, watching
from tests.support.control_plane import ControlPlane
from tests.support.reference_fold import Decided, reference_decisions

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.chain import is_intact
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.messages import Action, Job, State
from dynamix.schemas.streams import ACTIONS, FEED


async def recorded_states(bus: Bus, job: Job) -> list[tuple[int, State]]:
    """A job's states as FEED has them; unreadable messages are skipped, as in every fold."""
    states = []
    for message in await stored_messages(bus, FEED.name, subjects.of("state", job.job, subjects.ANY)):
        with contextlib.suppress(MalformedMessageError):
            states.append((message.sequence, decode(State, message.subject, message.payload)))
    return states


async def check_decisions(
    bus: Bus, *generations: Job, num_windows: int | None = None, feed: list[tuple[int, State]] | None = None
) -> list[Action]:
    """Check that a job's stored actions are those of one arbitrator that never failed: in order, each window once.

    Args:
        bus: to read with.
        generations: the job's specifications, one per generation.
        num_windows: when given, the actions are exactly those of the windows from 0 on.
        feed: the recorded states, where FEED has dropped them.

    Returns the stored actions.
    """
    recorded = await stored_messages(bus, ACTIONS.name, subjects.of("action", generations[0].job))
    actions = [decode(Action, message.subject, message.payload) for message in recorded]
    check_chain(actions)
    expected: list[tuple[int, Decided]] = []
    for job in generations:
        states = await recorded_states(bus, job) if feed is None else feed
        expected += [(job.generation, one) for one in reference_decisions(job, policy_named(job.policy), states)]
    assert [
        (one.generation, one.window, one.local_batch_sizes, one.allocation.split, one.gap, one.carry) for one in actions
    ] == [
        (generation, one.window, one.local_batch_sizes, one.decision.allocation.split, one.gap, one.decision.carry)
        for generation, one in expected
    ]
    if num_windows is not None:
        assert [action.window for action in actions] == list(range(num_windows))
    return actions


async def check_all_there(plane: ControlPlane, job: Job, num_windows: int) -> None:
    """Each window has one metric window, one state and one reward, and one decision, that of the reference fold."""
    for kind in ("window", "state", "reward"):
        messages = await plane.wait_for(FEED.name, subjects.of(kind, job.job, "*"), num_windows)
        assert sorted(message.window for message in messages) == list(range(num_windows))  # type: ignore[attr-defined]
    async with watching(plane.bus, job.job) as watch:
        await watch.until_decided(num_windows)
    await check_decisions(plane.bus, job, num_windows=num_windows)


def check_chain(actions: list[Action]) -> None:
    """Check that every action is unchanged since it was sealed, and follows its predecessor."""
    assert all(is_intact(encode(action)) for action in actions)
    assert actions[0].previous_hash == b""
    assert all(new.previous_hash == old.hash for old, new in itertools.pairwise(actions))
