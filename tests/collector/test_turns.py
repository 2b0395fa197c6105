"""Whose report is handled next, and what may be acknowledged."""

import random

import pytest

from dynamix.collector import turns
from dynamix.collector.turns import MAX_TURN, NEW_JOB_BYTES, OVERHEAD_BYTES, TURN_BYTES, WaitingReports
from dynamix.runtime.bus import BusMessage
from dynamix.schemas import subjects

SMALL, LARGE = 2_000, 450_000


def message(job: str, sequence: int, num_bytes: int = SMALL) -> BusMessage:
    return BusMessage(subjects.of("report", job, "node-a"), bytes(num_bytes), sequence, 0, 0)


def waiting(*messages: BusMessage) -> WaitingReports:
    reports = WaitingReports()
    reports.add_messages(messages)
    return reports


def sequences(reports: WaitingReports) -> list[int]:
    return [report.message.sequence for report in reports.take_turn()]


@pytest.mark.parametrize("num_jobs", [1, 256])
def test_a_small_report_waits_for_no_large_one_read_before(num_jobs: int) -> None:
    crowd = [message(f"crowd-{number % num_jobs}", number + 1, LARGE) for number in range(256)]
    reports = waiting(*crowd, message("honest", 257))
    assert sequences(reports) == [257]
    assert [sequences(reports) for _ in range(256)] == [[number + 1] for number in range(256)]
    assert not reports


def test_a_small_report_that_comes_later_waits_for_no_large_one_either() -> None:
    reports = waiting(*(message("crowd", number, LARGE) for number in range(1, 9)))
    assert [sequences(reports) for _ in range(4)] == [[1], [2], [3], [4]]
    reports.add_messages([message("honest", 9)])
    assert sequences(reports) == [9]


def test_a_large_report_waits_for_as_many_bytes_of_small_ones() -> None:
    """So that no job waits for ever for jobs that send much in small reports."""
    reports, handled = waiting(message("large", 1, LARGE)), 0
    for number in range(2, 1000):
        reports.add_messages([message("small", number), message("small", 10_000 + number)])
        (first, *rest) = sequences(reports)
        handled += 1 + len(rest)
        if 1 in (first, *rest):
            break
    assert handled * (SMALL + OVERHEAD_BYTES) == pytest.approx(NEW_JOB_BYTES + LARGE, rel=0.02)


def test_a_known_job_waits_for_no_crowd_of_new_ones() -> None:
    """Those that wait when it reports again, too, though they have waited for longer."""
    reports = waiting(message("honest", 1))
    assert sequences(reports) == [1]
    reports.add_messages(message(f"new-{number}", number) for number in range(2, 1002))
    for later in range(3):
        assert 1 not in sequences(reports)
        reports.add_messages([message("honest", 2000 + later)])
        assert sequences(reports)[0] == 2000 + later


def test_a_new_job_waits_for_a_known_one_a_little_only() -> None:
    reports, num_before = waiting(*(message("known", number) for number in range(1, 1001))), 0
    assert len(sequences(reports)) == MAX_TURN
    reports.add_messages([message("new", 2000)])
    while 2000 not in (turn := sequences(reports)):
        num_before += len(turn)
    num_before += turn.index(2000)
    assert num_before * (SMALL + OVERHEAD_BYTES) == pytest.approx(NEW_JOB_BYTES, rel=0.03)


def test_only_so_many_jobs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was handled longest ago is new again."""
    monkeypatch.setattr(turns, "MAX_KNOWN", 2)
    reports = waiting(message("a", 1), message("b", 2), message("c", 3))
    assert sequences(reports) == [1, 2, 3]
    reports.add_messages([message("a", 4), message("b", 5), message("c", 6)])
    assert sequences(reports) == [5, 6, 4]


def test_every_report_has_its_turn_once_and_those_of_a_job_keep_their_order() -> None:
    chance, reports, handled = random.Random(7), WaitingReports(), []
    for number in range(1, 2000):
        reports.add_messages([message(f"job-{chance.randrange(9)}", number, chance.choice((100, SMALL, LARGE)))])
        if number % 3 == 0:
            handled += reports.take_turn()
    while reports:
        handled += reports.take_turn()
    assert sorted(report.message.sequence for report in handled) == list(range(1, 2000))
    by_job: dict[str, list[int]] = {}
    for report in handled:
        by_job.setdefault(report.message.subject, []).append(report.message.sequence)
    assert len(by_job) == 9
    assert all(found == sorted(found) for found in by_job.values())


def test_a_turn_has_bounds_in_reports_and_in_bytes() -> None:
    assert len(sequences(waiting(*(message("a", number, 100) for number in range(1, 2 * MAX_TURN))))) == MAX_TURN
    reports = waiting(*(message("a", number, TURN_BYTES // 2) for number in range(1, 6)))
    assert [sequences(reports) for _ in range(3)] == [[1, 2], [3, 4], [5]]


def test_only_what_has_no_unhandled_one_before_it_is_acknowledged() -> None:
    reports = waiting(message("large", 1, LARGE), message("small", 2), message("large", 3, LARGE))
    acknowledged = []
    while reports:
        last = reports.finish(reports.take_turn())
        acknowledged.append(None if last is None else last.sequence)
    assert acknowledged == [None, 2, 3]


def test_the_newest_report_of_each_job_is_known() -> None:
    reports = waiting(message("a", 1), message("b", 2), message("a", 3))
    assert {report.message.sequence: report.is_newest for report in reports.take_turn()} == {
        1: False,
        2: True,
        3: True,
    }


def test_reading_stops_while_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING_BYTES", 3 * LARGE)
    reports = waiting(message("a", 1, LARGE), message("a", 2, LARGE))
    assert reports.has_room
    reports.add_messages([message("a", 3, LARGE)])
    assert not reports.has_room
    reports.finish(reports.take_turn())
    assert reports.has_room
    monkeypatch.setattr(turns, "MAX_UNFINISHED", 2)
    assert not reports.has_room, "2 and 3 are not acknowledged yet"


def test_a_report_is_pressing_where_nothing_of_its_known_job_waits() -> None:
    reports = WaitingReports()
    assert not reports.add_messages([message("a", 1)]), "a new job"
    reports.finish(reports.take_turn())
    assert reports.add_messages([message("a", 2)])
    assert not reports.add_messages([message("a", 3), message("b", 4)])
    assert not reports.add_messages([])


def test_the_job_with_most_reports_loses_its_older_half_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING", 8)
    reports = waiting(message("honest", 1), *(message("flood", number) for number in range(2, 11)))
    assert reports.num_passed_over == 0, "8, and one of each job"
    reports.add_messages([message("flood", 11)])
    assert (reports.num_passed_over, reports.crowding_job) == (5, "flood")
    assert sequences(reports) == [1, 7, 8, 9, 10, 11]
    assert not reports


def test_the_job_with_most_bytes_loses_its_older_half_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING_BYTES", 4 * LARGE)
    large = [message("large", number, LARGE) for number in range(10, 14)]
    reports = waiting(*(message("small", number) for number in range(1, 9)), *large)
    assert (reports.num_passed_over, reports.crowding_job) == (2, "large")
    handled = []
    while reports:
        handled += sequences(reports)
    assert handled == [*range(1, 9), 12, 13]


def test_reports_that_were_passed_over_are_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING", 2)
    reports = waiting(*(message("a", number) for number in range(1, 5)))
    assert reports.num_passed_over == 2
    last = reports.finish(reports.take_turn())
    assert last is not None
    assert last.sequence == 4


def test_a_crowd_of_jobs_with_a_report_each_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING", 2)
    reports = waiting(*(message(f"job-{number}", number) for number in range(1, 31)))
    assert (len(sequences(reports)), reports.num_passed_over) == (30, 0)


def test_subjects_that_name_no_job_wait_as_one() -> None:
    odd = [BusMessage(f"dynamix.v1.report.JOB-{number}.node-a", bytes(LARGE), number, 0, 0) for number in range(1, 9)]
    reports = waiting(*odd, message("honest", 9))
    assert sequences(reports) == [9]
    assert sequences(reports) == [1]
