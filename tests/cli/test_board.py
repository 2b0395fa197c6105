"""The board: a fold of a job's messages that does not mind order, repetition or restarts."""

import random
from typing import Any

import msgspec
import pytest
from tests.support import examples
from tests.support.examples import applied, event, reward

from dynamix.cli.board.board import Board
from dynamix.cli.board.timeline import HISTORY_WINDOWS
from dynamix.schemas.messages import Message


def both_nodes(window: int = 0, **changes: Any) -> list[Message]:
    return [examples.window("node-a", (0, 1), window, **changes), examples.window("node-b", (2, 3), window, **changes)]


def board_of(*messages: Message) -> Board:
    board = Board(examples.JOB)
    for message in messages:
        board.fold(message)
    return board


def test_before_the_first_window_the_sizes_are_those_the_job_began_with() -> None:
    board = board_of(examples.job())
    assert board.local_batch_sizes == (128, 128, 128, 128)
    assert (board.window, board.metrics) == (-1, None)


def test_two_nodes_make_four_ranks_and_one_point_of_the_curves() -> None:
    board = board_of(examples.job(), *both_nodes())
    assert sorted(board.ranks) == [0, 1, 2, 3]
    assert {row.node for row in board.ranks.values()} == {"node-a", "node-b"}
    assert board.curve("throughput") == [5120.0]


def test_a_node_that_is_behind_keeps_its_last_row() -> None:
    board = board_of(*both_nodes(0), examples.window("node-a", (0, 1), 1))
    assert {rank: row.window for rank, row in board.ranks.items()} == {0: 1, 1: 1, 2: 0, 3: 0}
    assert board.window == 1


def test_the_order_of_messages_within_a_generation_does_not_matter() -> None:
    messages = [
        examples.job(),
        *(message for window in range(4) for message in both_nodes(window)),
        *(reward("node-a", (0, 1), window, 0.1 * window) for window in range(4)),
        *(examples.action(window) for window in range(4)),
        *(applied(window, window + 2) for window in range(4)),
    ]
    expected = state(board_of(*messages))
    for seed in range(20):
        shuffled = random.Random(seed).sample(messages, len(messages))
        assert state(board_of(*shuffled, *shuffled)) == expected


def state(board: Board) -> tuple[object, ...]:
    """What the view shows, the curves left out: they are in the order of arrival."""
    return (
        board.job,
        board.generation,
        board.window,
        board.ranks,
        board.nodes,
        board.action,
        board.applied,
        board.mean_reward(),
        board.reward_terms(),
        board.metrics,
    )


def test_a_restart_begins_anew_and_late_messages_of_the_old_generation_do_not_count() -> None:
    board = board_of(examples.job(), *both_nodes(7), examples.action(7), applied(5, 7), reward("node-a", (0, 1), 7))
    board.fold(examples.job(generation=1))
    assert (board.window, board.ranks, board.action, board.applied) == (-1, {}, None, None)
    board.fold(examples.window("node-a", (0, 1), 8))
    assert board.ranks == {}
    board.fold(examples.window("node-a", (0, 1), 0, generation=1))
    assert (board.window, board.generation, sorted(board.ranks)) == (0, 1, [0, 1])
    assert len(board.curve("loss")) == 2


def test_another_jobs_messages_are_not_ours() -> None:
    board = board_of(examples.job(job="other-00000000"), examples.window(job="other-00000000"))
    assert (board.job, board.ranks) == (None, {})


def test_rewards_may_come_before_or_after_their_window() -> None:
    before = board_of(reward("node-a", (0, 1)), examples.window("node-a", (0, 1)))
    after = board_of(examples.window("node-a", (0, 1)), reward("node-a", (0, 1)))
    assert before.ranks == after.ranks
    assert before.mean_reward() == pytest.approx(0.5)


def test_terms_are_means_over_ranks_in_the_order_of_the_formula() -> None:
    board = board_of(*both_nodes(), reward("node-a", (0, 1), value=0.2), reward("node-b", (2, 3), value=0.6))
    assert list(board.reward_terms()) == ["accuracy", "size"]
    assert board.reward_terms() == pytest.approx({"accuracy": 0.5, "size": -0.1})
    assert board.mean_reward() == pytest.approx(0.4)


def test_the_end_of_a_job_is_kept() -> None:
    board = board_of(examples.job(), *both_nodes(3), examples.job(phase="ended", end_reason="done"))
    assert board.job is not None
    assert (board.job.phase, board.job.end_reason, board.window) == ("ended", "done", 3)


def test_curves_leave_out_what_is_not_known_and_are_bounded() -> None:
    board = Board(examples.JOB)
    for window in range(2 * HISTORY_WINDOWS):
        known = None if window % 2 else float(window)
        board.fold(examples.window("node-a", (0, 1), window, job_metrics=examples.job_metrics(held_out_accuracy=known)))
    assert len(board.timeline.points) == HISTORY_WINDOWS
    assert board.curve("held_out_accuracy") == [float(w) for w in range(HISTORY_WINDOWS, 2 * HISTORY_WINDOWS, 2)]


def test_a_collector_that_refused_processes_is_remembered() -> None:
    refused = msgspec.structs.replace(examples.window(), refused_pids=(17,))
    assert board_of(refused).nodes["node-a"].refused_pids == (17,)


def test_the_newest_failure_signature_is_kept_until_a_restart() -> None:
    board = board_of(examples.job(), event(20), event(60), event(40))
    assert board.event is not None
    assert board.event.window == 60
    board.fold(examples.job(generation=1))
    assert board.event is None
