"""The fold: when a window closes, what is seen then, and that a restart anywhere changes nothing.

The reference fold is the oracle of the fault tests: the arbitrator's never differs from it.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import examples
from tests.support.reference_fold import reference_decisions

from dynamix.arbitrator.deciding.fold import MAX_SKIP_WINDOWS, Fold
from dynamix.arbitrator.policies.policy import Array32, Decision
from dynamix.schemas.chain import is_intact
from dynamix.schemas.codec import MalformedMessageError, encode
from dynamix.schemas.features import RANK_INDEX
from dynamix.schemas.messages import Action, Job, State
from dynamix.schemas.messages.allocation import Allocation

NODES = {"node-a": (0, 1), "node-b": (2, 3), "node-c": (4,)}
JOB = examples.job(NODES)
Feed = list[tuple[int, State]]


class Witness:
    """Sizes every rank by all that it is shown, so that no difference of inputs goes unseen."""

    name = "witness"
    version = 1

    def __init__(self) -> None:
        self.ages: dict[int, list[float]] = {}

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002
        shown = np.nan_to_num(obs_WF, nan=-7.0).astype(np.float64).sum(axis=1) + np.nan_to_num(global_F).sum() + window
        self.ages[window] = obs_WF[:, RANK_INDEX["age_windows"]].tolist()
        sizes = tuple(int(value * 1000) % 2000 for value in shown)
        return Decision(Allocation(sizes), carry=carry[-8:] + bytes([sum(sizes) % 256]))


def actions_of(job: Job, feed: Feed, stored: Sequence[Action] = ()) -> list[Action]:
    """The decisions of the arbitrator's own fold, restarted after these actions."""
    return [*stored, *decided_by(Fold(job, Witness(), stored[-1] if stored else None), feed)]


def decided_by(fold: Fold, feed: Feed) -> list[Action]:
    """Every decision is stored at once, as the broker would."""
    actions = []
    for sequence, state in feed:
        try:
            fold.add_state(sequence, state)
        except MalformedMessageError:
            continue
        while (action := fold.close()) is not None:
            fold.adopt(action)
            actions.append(action)
    return actions


def numbered(*states: State) -> Feed:
    return list(enumerate(states, start=1))


@cache
def of(node: str, window: int, speed: float = 900.0) -> State:
    ranks = NODES[node]
    return examples.state(node, ranks, window, throughput=tuple(speed + rank for rank in ranks))


def all_of(window: int) -> list[State]:
    return [of(node, window) for node in NODES]


def test_a_dead_node_holds_a_window_for_two_and_is_forgotten_after_sixteen() -> None:
    witness = Witness()
    feed = numbered(*all_of(0), *[of(node, window) for window in range(1, 30) for node in ("node-a", "node-b")])
    decided = reference_decisions(JOB, witness, feed)
    assert [one.window for one in decided] == list(range(28))
    assert decided[1].sequence == 3 + 2 * 2 + 1  # the first state of window 3
    assert [witness.ages[window][4] for window in (1, 15, 16, 17)] == [1, 15, 16, 16]


def test_after_a_gap_the_first_full_window_is_decided_and_marked() -> None:
    last = actions_of(JOB, numbered(*all_of(0)))[-1]
    fold = Fold(JOB, Witness(), last)
    fold.start_after_gap(40)
    states = [of("node-b", 7), of("node-c", 8), *all_of(8)[:2], *all_of(9)]
    actions = decided_by(fold, list(enumerate(states, start=50)))
    assert [(action.window, action.gap) for action in actions] == [(8, True), (9, False)]
    assert actions[0].previous_hash == last.hash
    assert actions[1].previous_hash == actions[0].hash
    assert all(is_intact(encode(action)) for action in actions)


def test_an_action_of_an_earlier_generation_only_gives_the_chain_its_predecessor() -> None:
    last = actions_of(JOB, numbered(*all_of(0)))[-1]
    fold = Fold(examples.job(NODES, generation=1), Witness(), last)
    states = [examples.state(node, ranks, 0, generation=1) for node, ranks in NODES.items()]
    (action,) = decided_by(fold, list(enumerate(states, start=10)))
    assert (action.generation, action.window, action.previous_hash) == (1, 0, last.hash)


def test_a_jump_that_the_next_state_confirms_is_followed_with_a_gap_and_an_absurd_window_is_not() -> None:
    far = MAX_SKIP_WINDOWS + 500
    feed = numbered(of("node-a", 2**40), *all_of(0), of("node-a", far), *all_of(far + 1), *all_of(far + 2))
    actions = actions_of(JOB, feed)
    assert [(one.window, one.gap) for one in actions] == [(0, False), (far + 1, True), (far + 2, False)]


@st.composite
def feeds(draw: st.DrawFn, odd: Sequence[str]) -> Feed:
    """Several nodes at their own paces, with these oddities in between."""
    at, states = dict.fromkeys(NODES, 0), []
    for _ in range(draw(st.integers(1, 60))):
        node = draw(st.sampled_from(sorted(NODES)))
        kind = draw(st.sampled_from(["next"] * 8 + [*odd]))
        at[node] += {"next": 1, "skip": draw(st.integers(2, 20)), "leap": draw(st.integers(60, 140))}.get(kind, 0)
        window = {"late": max(0, at[node] - draw(st.integers(1, 5))), "absurd": 2**40}.get(kind, at[node])
        speed = draw(st.sampled_from([500.0, 900.0, 2000.0]))
        states.append(examples.state("node-a", (9,), window) if kind == "stranger" else of(node, window, speed))
    return numbered(*states)


def check_equal(feed: Feed, actions: list[Action]) -> None:
    decided = reference_decisions(JOB, Witness(), feed)
    assert [(one.window, one.local_batch_sizes, one.gap, one.decision.carry) for one in decided] == [
        (action.window, action.local_batch_sizes, action.gap, action.carry) for action in actions
    ]


@settings(max_examples=150, deadline=None)
@given(feeds(odd=["skip", "again", "late", "absurd", "stranger", "leap"]))
def test_the_arbitrators_fold_and_the_oracle_never_differ(feed: Feed) -> None:
    check_equal(feed, actions_of(JOB, feed))


@settings(max_examples=150, deadline=None)
@given(feeds(odd=["skip", "again", "late", "absurd", "stranger"]), st.data())
def test_nor_do_they_over_restarts_of_the_arbitrator(feed: Feed, data: st.DataObject) -> None:
    """No leaps: one that is not yet confirmed is judged by how far the job was, which a restart may see otherwise."""
    actions: list[Action] = []
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(feed)), max_size=3))), len(feed)]:
        actions = actions_of(JOB, feed[:end], actions)
    check_equal(feed, actions)
