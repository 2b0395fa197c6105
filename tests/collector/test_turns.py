"""Whose report is handled next, and what may be acknowledged."""

import random

import pytest

from dynamix.collector import turns
from dynamix.collector.turns import NEW_JOB_BYTES, OVERHEAD_BYTES, WaitingReport, WaitingReports
from dynamix.runtime.bus import BusMessage
from dynamix.schemas import subjects

SMALL, LARGE = 2_000, 450_000


def message(job: str, sequence: int, num_bytes: int = SMALL) -> BusMessage:
    return BusMessage(subjects.of("report", job, "node-a"), bytes(num_bytes), sequence, 0, 0)


def waiting(*messages: BusMessage) -> WaitingReports:
    reports = WaitingReports()
    reports.add_messages(messages)
    return reports


def take(reports: WaitingReports) -> int:
    """The sequence of the one whose turn it is."""
    return reports.take().message.sequence


def sequences(reports: WaitingReports) -> list[int]:
    """All that wait, in their turns."""
    found = []
    while reports:
        found.append(take(reports))
    return found


@pytest.mark.parametrize("num_jobs", [1, 256])
def test_a_small_report_waits_for_no_large_one_read_before(num_jobs: int) -> None:
    crowd = [message(f"crowd{number % num_jobs}", number + 1, LARGE) for number in range(256)]
    assert sequences(waiting(*crowd, message("honest", 257))) == [257, *range(1, 257)]


def test_a_small_report_that_comes_later_waits_for_no_large_one_either() -> None:
    reports = waiting(*(message("crowd", number, LARGE) for number in range(1, 9)))
    assert [take(reports) for _ in range(4)] == [1, 2, 3, 4]
    reports.add_messages([message("honest", 9)])
    assert sequences(reports) == [9, 5, 6, 7, 8]


def test_a_large_report_waits_for_as_many_bytes_of_small_ones() -> None:
    """So that no job waits for ever for jobs that send much in small reports."""
    reports, handled = waiting(message("large", 1, LARGE)), 1
    for number in range(2, 1000):
        reports.add_messages([message("small", number)])
        if take(reports) == 1:
            break
        handled += 1
    assert handled * (SMALL + OVERHEAD_BYTES) == pytest.approx(NEW_JOB_BYTES + LARGE, rel=0.02)


def test_a_known_job_waits_for_no_crowd_of_new_ones() -> None:
    """Those that wait when it reports again, too, though they have waited for longer."""
    reports = waiting(message("honest", 1))
    assert take(reports) == 1
    reports.add_messages(message(f"new{number}", number) for number in range(2, 1002))
    for later in range(3):
        assert take(reports) == 2 + later
        reports.add_messages([message("honest", 2000 + later)])
        assert take(reports) == 2000 + later


def test_a_new_job_waits_for_a_known_one_a_little_only() -> None:
    reports = waiting(*(message("known", number) for number in range(1, 1001)))
    assert take(reports) == 1
    reports.add_messages([message("new", 2000)])
    num_before = sequences(reports).index(2000)
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
        reports.add_messages([message(f"job{chance.randrange(9)}", number, chance.choice((100, SMALL, LARGE)))])
        if number % 3 == 0:
            handled.append(reports.take())
    while reports:
        handled.append(reports.take())
    assert sorted(report.message.sequence for report in handled) == list(range(1, 2000))
    by_job: dict[str, list[int]] = {}
    for report in handled:
        by_job.setdefault(report.message.subject, []).append(report.message.sequence)
    assert len(by_job) == 9
    assert all(found == sorted(found) for found in by_job.values())


def test_only_what_has_no_unhandled_one_before_it_is_acknowledged() -> None:
    reports = waiting(message("large", 1, LARGE), message("small", 2), message("large", 3, LARGE))
    acknowledged = []
    while reports:
        last = reports.finish([reports.take()])
        acknowledged.append(None if last is None else last.sequence)
    assert acknowledged == [None, 2, 3]


def test_the_newest_report_of_each_job_is_known() -> None:
    reports = waiting(message("a", 1), message("b", 2), message("a", 3))
    found = [reports.take() for _ in range(3)]
    assert {report.message.sequence: report.is_newest for report in found} == {1: False, 2: True, 3: True}


def test_reading_stops_while_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING_BYTES", 3 * LARGE)
    reports = waiting(message("a", 1, LARGE), message("a", 2, LARGE))
    assert reports.has_room
    reports.add_messages([message("a", 3, LARGE)])
    assert not reports.has_room
    reports.finish([reports.take()])
    assert reports.has_room
    monkeypatch.setattr(turns, "MAX_UNFINISHED", 2)
    assert not reports.has_room, "2 and 3 are not acknowledged yet"


def test_a_report_is_pressing_where_nothing_of_its_known_job_waits() -> None:
    reports = WaitingReports()
    assert not reports.add_messages([message("a", 1)]), "a new job"
    reports.finish([reports.take()])
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
    assert sequences(reports) == [*range(1, 9), 12, 13]


def test_reports_that_were_passed_over_are_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING", 2)
    reports = waiting(*(message("a", number) for number in range(1, 5)))
    assert reports.num_passed_over == 2
    last = reports.finish([reports.take(), reports.take()])
    assert last is not None
    assert last.sequence == 4


def test_a_crowd_of_jobs_with_a_report_each_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING", 2)
    reports = waiting(*(message(f"job{number}", number) for number in range(1, 31)))
    assert (len(sequences(reports)), reports.num_passed_over) == (30, 0)


def test_subjects_that_name_no_job_wait_as_one() -> None:
    odd = [BusMessage(f"dynamix.v1.report.JOB-{number}.node-a", bytes(LARGE), number, 0, 0) for number in range(1, 9)]
    reports = waiting(*odd, message("honest", 9))
    assert [take(reports), take(reports)] == [9, 1]


def test_a_report_that_was_added_early_is_handled_once_and_acknowledged_in_the_order_of_the_stream() -> None:
    reports = waiting(message("flood", 1))
    reports.add_early(message("honest", 9))
    reports.add_early(message("honest", 9))
    first, second = reports.take(), reports.take()
    assert {first.message.sequence, second.message.sequence} == {1, 9}
    assert not reports
    early = first if first.message.sequence == 9 else second
    assert reports.finish([early]) is None
    reports.add_messages([message("flood", 2), message("honest", 9), message("flood", 10)])
    assert sequences(reports) == [2, 10]
    acknowledged = reports.finish([first, second, WaitingReport(message("flood", 2), is_newest=False)])
    assert acknowledged is not None
    assert acknowledged.sequence == 9
    reports.add_early(message("honest", 9))
    assert not reports, "it was read since"
