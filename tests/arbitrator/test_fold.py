"""The fold: when a window closes, what is seen then, and that a restart anywhere changes nothing."""

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import examples

from dynamix.arbitrator.deciding.fold import MAX_AGE_WINDOWS, MAX_SKIP_WINDOWS, Fold
from dynamix.arbitrator.policies.policy import Array32, Decision
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.schemas.chain import is_intact
from dynamix.schemas.codec import encode
from dynamix.schemas.features import RANK_INDEX
from dynamix.schemas.messages import Action, Job, State

NODES = {"node-a": (0, 1), "node-b": (2, 3)}
JOB = examples.job(NODES)


class Recorder:
    """A policy that changes nothing and keeps what it was shown."""

    name = "recorder"
    version = 1

    def __init__(self) -> None:
        self.seen: list[tuple[int, Array32, bytes]] = []

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002
        self.seen.append((window, obs_WF, carry))
        return Decision(job.initial_allocation, carry=carry + bytes([window % 256]))


def run(fold: Fold, states: Sequence[tuple[int, State]]) -> list[Action]:
    """Feed recorded states; every decision is stored at once, as the broker would."""
    actions = []
    for sequence, state in states:
        fold.add_state(sequence, state)
        while (action := fold.close()) is not None:
            fold.adopt(action)
            actions.append(action)
    return actions


def a(window: int) -> State:
    return examples.state("node-a", (0, 1), window)


def b(window: int) -> State:
    return examples.state("node-b", (2, 3), window)


def numbered(*states: State) -> list[tuple[int, State]]:
    return list(enumerate(states, start=1))


def test_a_window_closes_with_the_last_node_that_sends_it() -> None:
    fold = Fold(JOB, policy_named("static"), None)
    assert run(fold, [(1, a(0))]) == []
    assert [action.window for action in run(fold, [(2, b(0))])] == [0]


def test_a_window_closes_without_a_dead_collector_when_the_job_is_two_windows_on() -> None:
    recorder = Recorder()
    fold = Fold(JOB, recorder, None)
    actions = run(fold, numbered(a(0), b(0), a(1), a(2), a(3), a(4)))
    assert [action.window for action in actions] == [0, 1, 2]
    ages = [obs_WF[:, RANK_INDEX["age_windows"]].tolist() for _, obs_WF, _ in recorder.seen]
    assert ages == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 2, 2]]
    assert recorder.seen[2][1][2, RANK_INDEX["num_samples"]] == 1280


def test_a_node_never_heard_of_is_unknown_and_as_old_as_can_be() -> None:
    recorder = Recorder()
    run(Fold(JOB, recorder, None), numbered(a(0), a(1), a(2)))
    obs_WF = recorder.seen[0][1]
    assert np.isnan(obs_WF[2, RANK_INDEX["num_samples"]])
    assert obs_WF[3, RANK_INDEX["age_windows"]] == MAX_AGE_WINDOWS
    assert obs_WF[3, RANK_INDEX["decided_local_batch_size"]] == 128


def test_actions_chain_and_carry() -> None:
    recorder = Recorder()
    actions = run(Fold(JOB, recorder, None), numbered(a(0), b(0), a(1), b(1)))
    assert actions[0].previous_hash == b""
    assert actions[1].previous_hash == actions[0].hash
    assert all(is_intact(encode(action)) for action in actions)
    assert actions[1].carry == b"\x00\x01"


def test_one_absurd_window_number_does_not_move_the_job() -> None:
    fold = Fold(JOB, policy_named("static"), None)
    run(fold, [(1, a(2**40))])
    assert [action.window for action in run(fold, [(2, a(0)), (3, b(0))])] == [0]


def test_a_jump_that_the_next_state_confirms_is_followed_with_a_gap() -> None:
    fold = Fold(JOB, policy_named("static"), None)
    far = MAX_SKIP_WINDOWS + 500
    actions = run(fold, numbered(a(0), b(0), a(far), a(far + 1), b(far + 1), a(far + 2), b(far + 2)))
    assert [(action.window, action.gap) for action in actions] == [(0, False), (far + 1, True), (far + 2, False)]


def test_after_a_gap_the_first_full_window_is_decided_and_marked() -> None:
    last = run(Fold(JOB, policy_named("static"), None), numbered(a(0), b(0)))[-1]
    fold = Fold(JOB, policy_named("static"), last)
    fold.start_after_gap(40)
    actions = run(fold, [(50, b(7)), (51, a(8)), (52, b(8)), (53, a(9)), (54, b(9))])
    assert [(action.window, action.gap) for action in actions] == [(8, True), (9, False)]


def test_an_action_of_an_earlier_generation_only_gives_the_chain_its_predecessor() -> None:
    last = run(Fold(JOB, policy_named("static"), None), numbered(a(0), b(0)))[-1]
    fold = Fold(examples.job(NODES, generation=1), policy_named("static"), last)
    states = [examples.state(node, ranks, 0, generation=1) for node, ranks in NODES.items()]
    (action,) = run(fold, [(10, states[0]), (11, states[1])])
    assert (action.generation, action.window, action.previous_hash) == (1, 0, last.hash)


@st.composite
def feeds(draw: Callable[..., int]) -> list[tuple[int, State]]:
    """Recorded states of two nodes: some lost, some doubled, some late, order shuffled within a few windows."""
    num_windows = draw(st.integers(3, 30))
    keyed = []
    for window in range(num_windows):
        for node, ranks in NODES.items():
            for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 1, 2]))):
                delay = draw(st.sampled_from([0, 0, 0, 0, 1, 3, 20]))
                speeds = tuple(float(draw(st.integers(500, 4000))) for _ in ranks)
                keyed.append((window + delay, len(keyed), examples.state(node, ranks, window, throughput=speeds)))
    return numbered(*[state for _, _, state in sorted(keyed, key=lambda item: item[:2])])


@settings(max_examples=60, deadline=None)
@given(feeds(), st.data(), st.sampled_from(["proportional", "random"]))
def test_a_restart_after_any_message_gives_the_same_bytes(
    feed: list[tuple[int, State]], data: st.DataObject, policy: str
) -> None:
    """The stored action is the whole checkpoint: read on from its watermark, decide the same, decide nothing twice."""
    job = examples.job(NODES, policy=policy)
    reference = run(Fold(job, policy_named(policy), None), feed)
    cuts = data.draw(st.lists(st.integers(0, len(feed)), max_size=4).map(sorted))
    stored: list[Action] = []
    for cut in [*cuts, len(feed)]:
        last = stored[-1] if stored else None
        fold = Fold(job, policy_named(policy), last)
        stored += run(fold, [(sequence, state) for sequence, state in feed[:cut] if sequence > fold.watermark])
    assert stored == reference
    assert [action.window for action in stored] == list(range(len(stored)))
