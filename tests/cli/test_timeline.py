"""What a board keeps window by window, and when it holds a job for dead."""

import random

import msgspec
import pytest
from tests.support import examples
from tests.support.examples import applied, reward

from dynamix.cli.board.board import Board
from dynamix.cli.board.timeline import Timeline
from dynamix.cli.jobs import newest_job

S = 10**9


def board_with(*windows: int, every_s: float = 1.0) -> Board:
    """A job that started at second 1 and sends a window every so often, the first at second 2."""
    board = Board(examples.JOB)
    board.fold(examples.job(), S)
    for window in windows:
        for node, ranks in (("node-a", (0, 1)), ("node-b", (2, 3))):
            board.fold(examples.window(node, ranks, window), int((2 + window * every_s) * S))
    return board


def test_both_nodes_of_a_window_are_one_point_with_all_sizes() -> None:
    (point,) = board_with(0).timeline.points
    assert (point.window, point.time_ns, point.local_batch_sizes) == (0, 2 * S, dict.fromkeys(range(4), 128))
    assert sorted(point.nodes) == ["node-a", "node-b"]


def test_traffic_of_a_node_is_the_sum_of_its_ranks_over_the_windows_time() -> None:
    """Ten steps of 0.1 s; each of two ranks sent 4 MB."""
    traffic = board_with(0).timeline.points[0].nodes["node-a"]
    assert (traffic.tx_bytes_per_s, traffic.rx_bytes_per_s) == (8e6, 8e6)


def test_rewards_of_unequal_nodes_count_by_their_ranks() -> None:
    board = board_with(0)
    board.fold(reward("node-a", (0,), 0, 0.2))
    board.fold(reward("node-b", (1, 2, 3), 0, 0.6))
    (point,) = board.timeline.points
    assert point.mean_reward() == pytest.approx(0.5)
    assert {name: round(value, 6) for name, value in point.reward_terms().items()} == {"accuracy": 0.6, "size": -0.1}


def test_a_decision_and_its_adoption_meet_in_any_order() -> None:
    messages = [examples.action(0), examples.action(1), applied(0, 2)]
    for order in (messages, messages[::-1]):
        board = board_with(0)
        for message in order:
            board.fold(message, 7 * S)
        assert [
            (one.window, one.time_ns, one.applied.effective_window if one.applied else None)
            for one in board.timeline.decisions
        ] == [(0, 7 * S, 2), (1, 7 * S, None)]


def test_a_reader_finds_what_changed_since_its_last_look() -> None:
    board = board_with(0, 1)
    seen = board.timeline.revision
    board.fold(examples.window("node-a", (0, 1), 2), 9 * S)
    assert [point.window for point in board.timeline.points if point.revision > seen] == [2]


def test_the_oldest_windows_are_dropped_and_order_does_not_matter() -> None:
    windows = [examples.window(window=window) for window in range(10)]
    for seed in range(5):
        timeline = Timeline(most_windows=3)
        for window in random.Random(seed).sample(windows, len(windows)):
            timeline.add_window(window, S)
        assert timeline.points[-1].window == 9
        assert len(timeline.points) == 3


def test_the_policys_memory_is_not_kept() -> None:
    board = board_with(0)
    board.fold(examples.action(0, carry=b"x" * 1000))
    assert board.timeline.decisions[0].action == examples.action(0)


def test_the_newest_decisions_reason_is_known() -> None:
    board = board_with(0)
    assert board.reason == ""
    board.fold(examples.action(1, reason="640 samples buy the most"))
    board.fold(examples.action(0, reason="an older one"))
    assert board.reason == "640 samples buy the most"


def test_a_job_that_sends_nothing_for_a_minute_is_silent() -> None:
    board = board_with(0, 1)
    last = 3 * S
    assert [board.phase(last + age * S) for age in (0, 59, 61)] == ["running", "running", "silent"]


def test_before_its_first_window_a_job_has_ten_minutes() -> None:
    board = board_with()
    assert [board.phase(S + age * S) for age in (599, 601)] == ["running", "silent"]


def test_a_job_with_long_windows_has_three_of_its_longest_pauses() -> None:
    board = board_with(0, 1, 2, every_s=100)
    last = (2 + 200) * S
    assert [board.phase(last + age * S) for age in (299, 301)] == ["running", "silent"]


def test_a_job_that_said_that_it_ended_is_never_silent() -> None:
    board = board_with(0)
    board.fold(examples.job(phase="ended"), 3 * S)
    assert board.phase(10**6 * S) == "ended"


def test_a_message_wakes_a_silent_job() -> None:
    board = board_with(0)
    assert board.phase(100 * S) == "silent"
    board.fold(examples.window(window=1), 99 * S)
    assert board.phase(100 * S) == "running"


def test_a_killed_job_gives_way_to_one_that_runs() -> None:
    jobs = {
        name: msgspec.structs.replace(examples.job(), job=name, phase=phase)
        for name, phase in (("a-00000001", "running"), ("b-00000002", "running"), ("c-00000003", "ended"))
    }
    assert newest_job(jobs, None) == "b-00000002"
    assert newest_job(jobs, None, {"b-00000002"}) == "a-00000001"
    assert newest_job(jobs, None, {"a-00000001", "b-00000002"}) == "c-00000003"
    assert newest_job(jobs, "b", {"b-00000002"}) == "b-00000002"
