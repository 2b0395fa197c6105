"""Frames of `dynamix top`: what they say, and that they fit every terminal."""

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support import examples
from tests.support.examples import applied, event, reward

from dynamix.cli.board.board import Board
from dynamix.cli.board.heartbeats import Heartbeats
from dynamix.cli.commands.top.view.frame import frame
from dynamix.cli.commands.top.view.rank_table import BarSegment, stacked_bar
from dynamix.cli.formatting import bar, curve, duration, number, percent, signed_count
from dynamix.schemas.messages import Live, MetricWindow
from dynamix.schemas.messages.allocation import Exchange

SECOND_NS = 1_000_000_000


def window_of(ranks: dict[int, dict[str, Any]], index: int = 0, node: str = "node-a") -> MetricWindow:
    """A window whose ranks have the given training metrics."""
    plain = examples.window(node, tuple(ranks), index)
    changed = tuple(
        msgspec.structs.replace(rank, training=examples.training(**ranks[rank.rank])) for rank in plain.ranks
    )
    return msgspec.structs.replace(plain, ranks=changed)


def board_with(num_ranks: int = 4, num_windows: int = 3) -> Board:
    board = Board(examples.JOB)
    board.fold(examples.job({"node-a": tuple(range(num_ranks))}))
    for index in range(num_windows):
        ranks = {
            rank: {"local_batch_size": 100 + rank, "compute_time_s": 0.01 * (1 + rank % 7), "sync_time_s": 0.02}
            for rank in range(num_ranks)
        }
        board.fold(window_of(ranks, index), timestamp_ns=index * SECOND_NS)
        board.fold(reward("node-a", tuple(range(num_ranks)), index))
    deltas = tuple(25 if rank else -25 for rank in range(num_ranks))
    board.fold(examples.action(2, deltas=deltas, policy="proportional", local_batch_sizes=(128,) * num_ranks))
    board.fold(applied(0, 2, num_refused={"stale": 2, "generation": 0}))
    return board


def alive(*names: str, heard_s: float = 0.0) -> Heartbeats:
    services = Heartbeats()
    for name in names:
        services.record(Live(service=name, instance="node-a", uptime_s=1.0, node="node-a"), heard_s)
    return services


ALL = ("collector", "reward", "arbitrator")


def shown(board: Board | None, services: Heartbeats | None = None, width: int = 80, height: int = 24) -> str:
    lines = frame(board, services or alive(*ALL), now_ns=4 * SECOND_NS, now_s=1.0, width=width, height=height)
    return "\n".join(line.plain for line in lines)


def test_a_running_job_says_who_it_is_where_it_is_and_how_old_the_news_is() -> None:
    title = shown(board_with()).splitlines()[0]
    assert title.startswith("mnist-0a1b2c3d  ● running  proportional · window 2 · 4 ranks")
    assert title.endswith("2.0 s ago")


def test_the_whole_jobs_numbers_are_there() -> None:
    text = shown(board_with())
    for part in ("throughput   5,120/s", "loss         0.500", "accuracy     75.0 %", "held-out     70.0 %"):
        assert part in text
    assert "global batch 406 adaptive " in text


def test_a_fixed_global_batch_is_shown_as_such() -> None:
    board = board_with()
    board.fold(examples.job({"node-a": (0, 1, 2, 3)}, global_batch="fixed"))
    assert "global batch 406 fixed   " in shown(board)


def test_each_rank_has_its_size_its_times_and_its_reward() -> None:
    lines = shown(board_with()).splitlines()
    row = next(line for line in lines if line.startswith("   2   102"))
    assert "30.0 ms" in row
    assert "20.0 ms" in row
    assert "0.500" in row


def test_a_size_that_is_already_scheduled_is_shown_beside_the_one_in_force() -> None:
    board = Board(examples.JOB)
    board.fold(window_of({0: {"local_batch_size": 128, "pending_local_batch_size": 153}}))
    assert "128  →153" in shown(board)


def test_the_decision_its_adoption_and_the_refusals_are_there() -> None:
    text = shown(board_with())
    assert "decision  -25 +25 +25 +25  of window 2 by proportional v1" in text
    assert "adopted   of window 0, from window 2 on   refused: 2 stale" in text


def test_a_long_reason_takes_up_to_three_lines() -> None:
    board = board_with()
    board.fold(examples.action(3, reason="begins with what run 7 of the family taught, and tries out more " * 2))
    lines = shown(board, width=60, height=40).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("because   begins with what run 7"))
    assert all(line.startswith(" " * 10) for line in lines[at + 1 : at + 3])
    assert " ".join(line[10:].strip() for line in lines[at : at + 3]).endswith("tries out more")
    board.fold(examples.action(4, reason="word " * 100))
    lines = shown(board, width=60, height=40).splitlines()
    assert [line[:10].strip() for line in lines if "word" in line] == ["because", "", ""]
    assert next(line for line in reversed(lines) if "word" in line).endswith(" …")


def test_a_job_without_decisions_is_told_where_the_reason_is() -> None:
    board = Board(examples.JOB)
    board.fold(examples.job())
    board.fold(window_of({0: {"local_batch_size": 128}}))
    assert "decision  none yet: the initial sizes stay" in shown(board)
    board.fold(window_of({0: {"local_batch_size": 128}}, 3))
    assert "decision  none in 4 windows: the arbitrator's log says why" in shown(board)


def test_how_gradients_travel_is_shown_unless_they_are_exact() -> None:
    assert "gradients" not in shown(board_with())
    board = Board(examples.JOB)
    board.fold(examples.job(initial_exchange=Exchange(codec="rows")))
    assert "gradients rows over all-reduce" in shown(board)
    board.fold(applied(0, 2, exchange=Exchange(every=4, codec="int8", route="shares")))
    assert "gradients int8 over shares every 4 steps" in shown(board)


def test_a_decision_that_changes_nothing_says_so() -> None:
    board = board_with()
    board.fold(examples.action(3, deltas=(0, 0, 0, 0)))
    assert "decision  no change  of window 3" in shown(board)


def test_a_failure_signature_has_a_line_of_its_own() -> None:
    board = board_with()
    assert "signature" not in shown(board)
    board.fold(event(2))
    line = "signature size-stuck  75% of the ranks were at their minimum of 32  window 2"
    assert line in shown(board, width=100).splitlines()


def test_the_network_line_says_which_probe_counted_and_why_not_a_better_one() -> None:
    board = board_with()
    assert "network   tcp_info" in shown(board).splitlines()
    window = window_of({4: {}}, 3, "node-b")
    board.fold(msgspec.structs.replace(window, probe="ebpf", num_readings_lost=2))
    note = "ebpf: the report came late"
    board.fold(msgspec.structs.replace(window_of({0: {}}, 3), probe_note=note))
    line = "network   tcp_info on 1, ebpf on 1  ebpf: the report came late  2 readings lost"
    assert line in shown(board, width=100).splitlines()


def test_the_rewards_terms_are_shown_with_their_signs() -> None:
    assert "reward    0.500  paper-sgd:  accuracy +0.600  size -0.100" in shown(board_with())


def test_with_more_ranks_than_lines_the_slowest_are_shown_and_what_all_are_like() -> None:
    lines = shown(board_with(num_ranks=128)).splitlines()
    rows = [line for line in lines if "70.0 ms" in line and "20.0 ms" in line]
    summary = next(line for line in lines if line.startswith("slowest"))
    assert len(rows) == len(lines) - lines.index(next(line for line in lines if line.startswith("rank"))) - 8
    assert summary == f"slowest {len(rows)} of 128 · batch 100/164/227 · compute 10.0/40.0/70.0 ms (min/med/max)"
    assert "127 ranks more, 1 less, 0 the same" in "\n".join(lines)


@pytest.mark.parametrize("num_ranks", [2, 64])
def test_times_that_nobody_could_tell_apart_are_shown_as_not_known(num_ranks: int) -> None:
    board = Board(examples.JOB)
    whole: dict[str, Any] = {"compute_time_s": None, "sync_time_s": None, "step_time_s": 0.1}
    board.fold(window_of(dict.fromkeys(range(num_ranks), whole)))
    lines = shown(board, width=160).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("rank"))
    _, _, bar, *cells = lines[at + 1].split()
    assert set(bar) == {"▓", "-", "░"}
    assert bar.count("-") / len(bar) == pytest.approx(0.8, abs=0.05)
    assert cells[:2] == ["-", "-"]
    if num_ranks == 64:
        assert "compute - ms (min/med/max)" in shown(board, width=160)


def test_a_wide_terminal_shows_more_of_each_rank() -> None:
    narrow, wide = shown(board_with()), shown(board_with(), width=160, height=50)
    assert "retrans" not in narrow
    for title in ("cpu", "retrans", "samp/s", "queued", "loss", "accuracy", "memory"):
        assert title in wide


def test_nodes_are_named_where_there_are_several() -> None:
    board = board_with(num_ranks=2)
    board.fold(window_of({2: {}, 3: {}}, 2, "node-b"))
    assert "node-b" in shown(board)


def test_a_broker_without_jobs_says_how_to_start_one() -> None:
    text = shown(None)
    assert "no job has run on this broker yet" in text
    assert "dynamix train" in text


def test_a_job_that_is_not_there_is_answered_with_those_that_are_in_a_line_of_their_own() -> None:
    missing = "no job is called 'x'; jobs on this broker: b-2, a-1"
    lines = frame(None, alive(), missing=missing, now_ns=0, now_s=0.0, width=80, height=24)
    assert [line.plain for line in lines[:2]] == missing.split("; ")


def test_a_job_without_windows_shows_what_it_begins_with() -> None:
    board = Board(examples.JOB)
    board.fold(examples.job())
    assert "waiting for the first window; local batch sizes 128 128 128 128" in shown(board)


def test_a_node_of_the_job_without_a_collector_is_named_with_the_fix() -> None:
    board = Board(examples.JOB)
    board.fold(examples.job({"node-x": (0, 1, 2, 3)}))
    fix = "start it, or set one DYNAMIX_NODE for it and the ranks"
    assert f"collector none on node-x: {fix}" in shown(board, width=80)
    board.fold(examples.job({"node-x": (0, 1), "node-y": (2, 3)}))
    assert f"none on node-x and 1 more: {fix}" in shown(board, width=120)
    assert "none on" not in shown(board, alive("reward"), width=120), "no collector at all is said of the services"
    board.fold(examples.job({"node-a": (0, 1, 2, 3)}))
    assert "none on" not in shown(board, width=120)
    elsewhere = board_with()
    elsewhere.fold(examples.job({"node-a": (0, 1, 2, 3)}))
    services = Heartbeats()
    services.record(Live(service="collector", instance="node-b", uptime_s=1.0, node="node-b"), 0.0)
    assert "none on" not in shown(elsewhere, services, width=120), "its windows came"


def test_a_job_that_ended_without_a_window_waits_for_none() -> None:
    board = Board(examples.JOB)
    board.fold(examples.job({"node-x": (0, 1, 2, 3)}, phase="ended", end_reason="completed"))
    assert "it ended and no window came; local batch sizes 128 128 128 128" in shown(board)
    assert "none on node-x" in shown(board)


def test_an_ended_job_says_why() -> None:
    board = board_with()
    board.fold(examples.job({"node-a": (0, 1, 2, 3)}, phase="ended", end_reason="all epochs done"))
    assert "■ ended" in shown(board, width=120)
    assert "all epochs done" in shown(board, width=120)


def test_a_service_that_fell_silent_or_was_never_heard_is_seen_to_be_missing() -> None:
    lines = frame(None, alive("collector", "reward"), now_ns=0, now_s=10.0, width=80, height=24)
    assert lines[-1].plain.rstrip() == "services  ○ collector node-a  ○ reward  ○ arbitrator not heard"


def test_a_trainer_that_has_ended_is_not_missed() -> None:
    services = alive("trainer", *ALL)
    assert "● trainer" in shown(None, services)
    lines = frame(None, services, now_ns=0, now_s=10.0, width=80, height=24)
    assert "trainer" not in lines[-1].plain


def test_dead_letters_are_counted_over_all_services() -> None:
    services = Heartbeats()
    for name in ALL:
        services.record(Live(service=name, instance="1", uptime_s=1.0, counters={"dead_letters": 2}), 0.0)
    assert "6 dead letters" in shown(None, services)
    assert "refused" not in shown(None, services)


def test_refused_action_logs_are_counted() -> None:
    services = alive("trainer", *ALL)
    services.record(Live(service="arbitrator", instance="1", uptime_s=1.0, counters={"refused_logs": 2}), 0.0)
    assert "2 logs refused" in shown(None, services)


def test_what_the_broker_does_not_store_is_counted_over_all_processes_first_in_the_line() -> None:
    services = alive(*ALL)
    for name, counters in (
        ("trainer", {"bus_unacknowledged": 3, "bus_in_flight": 40}),
        ("arbitrator", {"bus_unanswered": 2, "bus_failed_lately": 1}),
    ):
        services.record(Live(service=name, instance="1", uptime_s=1.0, counters=counters), 0.0)
    assert shown(None, services).splitlines()[-1].startswith("services  6 not stored by the broker  ● arbitrator")
    assert "not stored" not in shown(None, alive(*ALL))


@given(
    width=st.integers(1, 220),
    height=st.integers(1, 70),
    num_ranks=st.integers(1, 200),
    num_windows=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_a_frame_fits_every_terminal(width: int, height: int, num_ranks: int, num_windows: int) -> None:
    board = board_with(num_ranks, num_windows)
    lines = frame(board, alive(*ALL), now_ns=0, now_s=0.0, width=width, height=height)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)


@given(st.lists(st.floats(-1e12, 1e12), max_size=300), st.integers(0, 100))
@example(values=[0.0, 1e-308], width=1)
def test_a_curve_is_never_wider_than_it_may_be(values: list[float], width: int) -> None:
    assert len(curve(values, width)) == min(len(values), width)


def test_a_curve_rises_with_its_values_and_its_newest_is_last() -> None:
    assert curve([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert curve([3, 3, 3], 8) == "▄▄▄"


def test_one_wild_value_does_not_flatten_a_long_curve() -> None:
    assert len(set(curve([1000.0, *range(39)], 40)[1:])) == 8


@given(st.lists(st.floats(0, 10), min_size=1, max_size=5), st.integers(1, 80))
def test_a_bar_has_exactly_its_width(values: list[float], width: int) -> None:
    bar = stacked_bar([BarSegment(value, "█", "cyan") for value in values], sum(values), width)
    assert bar.cell_len == width


def test_a_bars_segments_have_their_shares() -> None:
    bar = stacked_bar([BarSegment(3.0, "█", ""), BarSegment(1.0, "▒", "")], 8.0, 16)
    assert bar.plain == "██████▒▒        "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (duration(None), "-"),
        (duration(0.0), "0 ms"),
        (duration(0.0000421), "42 µs"),
        (duration(0.0421), "42.1 ms"),
        (duration(42.1), "42.1 s"),
        (duration(600), "10 min"),
        (duration(9000), "2.5 h"),
        (number(None), "-"),
        (number(5120.4), "5,120"),
        (number(0.51234), "0.512"),
        (percent(0.8123), "81.2 %"),
        (signed_count(25), "+25"),
        (signed_count(0), "·"),
        (bar(0.5, 4), "██░░"),
        (bar(7.0, 4), "████"),
    ],
)
def test_numbers_are_written_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected
