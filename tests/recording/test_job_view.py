"""The view of a job: a fold of its messages that does not mind order, repetition or restarts."""

import random
from typing import Any

import msgspec
import pytest
from tests.support import examples
from tests.support.examples import applied, event, reward

from dynamix.recording.job_view import HISTORY_WINDOWS, JobView
from dynamix.schemas.messages import Message

S = 10**9
RANKS = {"node-a": (0, 1), "node-b": (2, 3)}


def both_nodes(window: int = 0, **changes: Any) -> list[Message]:
    return [examples.window(node, ranks, window, **changes) for node, ranks in RANKS.items()]


def view_of(*messages: Message, at_ns: int = 0, **options: Any) -> JobView:
    view = JobView(examples.JOB, **options)
    for message in messages:
        view.fold(message, at_ns)
    return view


def whole_job() -> list[Message]:
    return [
        examples.job(),
        *(message for window in range(4) for message in both_nodes(window)),
        *(reward("node-a", (0, 1), window, 0.1 * window) for window in range(4)),
        *(examples.action(window, reason=f"reason {window}", carry=b"memory") for window in range(4)),
        *(applied(window, window + 2) for window in range(4)),
        *(event(window) for window in (1, 3, 2)),
    ]


def state(view: JobView) -> tuple[object, ...]:
    windows = [
        (one.metrics, one.sizes, sorted(one.nodes), one.action, one.applied, one.mean_reward()) for one in view.history
    ]
    events = {one.window for _, one in view.events}
    now = (view.job, view.generation, view.window, view.ranks, view.nodes, view.action, view.applied, events)
    return (*now, view.rewarded.mean_reward(), view.rewarded.reward_terms(), view.metrics, windows)


def test_neither_order_nor_repetition_of_messages_matters() -> None:
    messages = whole_job()
    expected = state(view_of(*messages))
    for seed in range(20):
        shuffled = random.Random(seed).sample(messages, len(messages))
        assert state(view_of(*shuffled, *shuffled)) == expected


def test_the_newest_window_decision_and_reward_of_every_rank_are_known() -> None:
    view = view_of(examples.job())
    assert (view.window, view.metrics, view.local_batch_sizes) == (-1, None, (128, 128, 128, 128))
    view = view_of(*whole_job(), examples.window("node-a", (0, 1), 4))
    assert {rank: (row.node, row.window) for rank, row in view.ranks.items()} == {
        **dict.fromkeys((0, 1), ("node-a", 4)),
        **dict.fromkeys((2, 3), ("node-b", 3)),
    }
    assert (view.action.reason, view.events[-1][1]) == ("reason 3", event(2))
    assert view.rewarded.mean_reward() == pytest.approx(0.3)
    assert list(view.rewarded.reward_terms()) == ["accuracy", "size"]
    assert view.curve("throughput") == [5120.0] * 5
    assert view_of(examples.job(job="other-00000000"), examples.window(job="other-00000000")).history == []


def test_a_window_gathers_sizes_traffic_rewards_the_decision_and_its_adoption() -> None:
    """Ten steps of 0.1 s; each of two ranks sent 4 MB."""
    messages = [*both_nodes(), reward("node-a", (0,), 0, 0.2), reward("node-b", (1, 2, 3), 0, 0.6)]
    view = view_of(*messages, examples.action(0, carry=b"x" * 1000), applied(0, 2), *both_nodes(2), at_ns=7 * S)
    first, third = view.history
    assert (first.sizes, first.measured_ns, first.decided_ns) == ((128,) * 4, 7 * S, 7 * S)
    assert (first.nodes["node-a"].tx_bytes_per_s, first.nodes["node-b"].rx_bytes_per_s) == (8e6, 8e6)
    assert first.mean_reward() == pytest.approx(0.5)
    assert first.reward_terms() == pytest.approx({"accuracy": 0.6, "size": -0.1})
    assert first.action == examples.action(0), "a live view does not keep the policy's memory"
    assert first.applied == applied(0, 2)
    assert view.adopted(third) == [first]
    assert view.adopted(first) == []


def test_a_restart_begins_anew_and_late_messages_of_the_old_generation_are_history() -> None:
    view = view_of(*whole_job(), examples.job(generation=1))
    assert (view.window, view.ranks, view.action, view.applied, list(view.events)) == (-1, {}, None, None, [])
    view.fold(examples.window("node-a", (0, 1), 8))
    assert view.ranks == {}
    view.fold(examples.window("node-a", (0, 1), 0, generation=1))
    assert (view.window, view.generation, sorted(view.ranks)) == (0, 1, [0, 1])
    assert [(one.generation, one.window) for one in view.history][-2:] == [(0, 8), (1, 0)]


def test_history_is_bounded_in_any_order_and_a_reader_finds_what_changed() -> None:
    windows = [examples.window(window=window) for window in range(2 * HISTORY_WINDOWS)]
    view = view_of(*random.Random(0).sample(windows, len(windows)))
    assert (len(view.history), view.history[-1].window) == (HISTORY_WINDOWS, 2 * HISTORY_WINDOWS - 1)
    seen = view.revision
    view.fold(examples.action(2 * HISTORY_WINDOWS - 1))
    assert [one.window for one in view.history if one.revision > seen] == [2 * HISTORY_WINDOWS - 1]
    unknown = examples.window(window=999, job_metrics=examples.job_metrics(held_out_accuracy=None))
    view.fold(unknown)
    assert len(view.curve("held_out_accuracy")) == HISTORY_WINDOWS - 1


def test_metrics_of_every_rank_and_window_are_kept_on_demand() -> None:
    window, rewarded = examples.window("node-a", (0, 1)), reward("node-a", (0, 1))
    node = view_of(window, rewarded, keep_ranks=True).history[0].nodes["node-a"]
    assert (node.ranks, node.rewards) == (tuple(window.ranks), tuple(rewarded.ranks))
    assert view_of(window, rewarded).history[0].nodes["node-a"].ranks == ()


@pytest.mark.parametrize(
    ("windows", "every_s", "patience_s"),
    [((), 1, 600), ((0, 1), 1, 60), ((0, 1, 2), 100, 300)],
    ids=["before the first window", "short windows", "three of the longest pauses"],
)
def test_a_running_job_that_sends_nothing_is_silent_until_it_sends_again(
    windows: tuple[int, ...], every_s: int, patience_s: int
) -> None:
    view = JobView(examples.JOB)
    view.fold(examples.job(), S)
    for window in windows:
        view.fold(examples.window(window=window), (2 + window * every_s) * S)
    last_s = 2 + windows[-1] * every_s if windows else 1
    assert [view.phase((last_s + patience_s + more) * S) for more in (-1, 1)] == ["running", "silent"]
    view.fold(examples.window(window=9), (last_s + patience_s) * S)
    assert view.phase((last_s + patience_s + 1) * S) == "running"
    view.fold(msgspec.structs.replace(examples.job(), phase="ended"), 3 * S)
    assert view.phase(10**6 * S) == "ended"
