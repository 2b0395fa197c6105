"""Whose report is handled next, and what may be acknowledged."""

import random

import pytest

from dynamix.collector import turns
from dynamix.collector.turns import WaitingReports
from dynamix.runtime.bus import BusMessage
from dynamix.schemas import subjects


def message(job: str, sequence: int) -> BusMessage:
    return BusMessage(subjects.of("report", job, "node-a"), bytes(2_000), sequence, 0, 0)


def waiting(*messages: BusMessage) -> WaitingReports:
    """`honest` and `other` train here."""
    reports = WaitingReports()
    for job in ("honest", "other"):
        reports.note_training(message(job, 0).subject)
    reports.add(messages)
    return reports


def take(reports: WaitingReports, count: int = 10_000) -> list[int]:
    """The sequences of those whose turns come next."""
    found = []
    while reports and len(found) < count:
        found.append(reports.take()[0].sequence)
    return found


def test_a_job_that_trains_waits_for_one_report_of_each_other_one_and_as_many_of_strangers() -> None:
    flood = [message(f"stranger-{number}", number) for number in range(1, 1000)]
    crowd = [message(f"new{number}", 1000 + number) for number in range(1000)]
    reports = waiting(*flood, *crowd, *(message("other", number) for number in range(3000, 4000)))
    assert set(take(reports, 2)) == {1, 3000}
    reports.add([message("honest-0a1b2c3d", 5000)])
    assert 5000 in take(reports, 4)


def test_strangers_have_every_second_turn() -> None:
    reports = waiting(*(message("honest", number) for number in range(1, 100)), message("new", 100))
    assert 100 in take(reports, 2)


def test_every_report_has_its_turn_once_and_those_of_a_job_keep_their_order() -> None:
    chance, reports, handled = random.Random(7), waiting(), list[BusMessage]()
    names = ["honest", "other", "a", "b-1", "b-2"]
    for number in range(1, 2000):
        reports.add([message(chance.choice(names), number)])
        if number % 3 == 0:
            handled.append(reports.take()[0])
    while reports:
        handled.append(reports.take()[0])
    assert sorted(one.sequence for one in handled) == list(range(1, 2000))
    for name in names:
        own = [one.sequence for one in handled if one.subject == message(name, 0).subject]
        assert own == sorted(own)


def test_the_newest_report_of_each_subject_is_known() -> None:
    reports = waiting(message("a", 1), message("b", 2), message("a", 3))
    found = [reports.take() for _ in range(3)]
    assert {message.sequence: is_newest for message, is_newest in found} == {1: False, 2: True, 3: True}


def test_only_what_has_no_unhandled_one_before_it_is_acknowledged() -> None:
    reports, acknowledged = waiting(message("a", 1), message("b", 2), message("a", 3)), []
    for one in (message("b", 2), message("a", 1), message("a", 3)):
        reports.finish(one)
        last = reports.acknowledge()
        acknowledged.append(None if last is None else last.sequence)
    assert acknowledged == [None, 2, 3]


def test_reading_stops_while_too_much_waits_or_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING_BYTES", 6_000)
    reports = waiting(message("a", 1), message("a", 2))
    assert reports.has_room
    reports.add([message("a", 3)])
    assert not reports.has_room
    taken = [reports.take()[0] for _ in range(3)]
    assert reports.has_room
    monkeypatch.setattr(turns, "MAX_READ", 3)
    assert not reports.has_room
    reports.finish(taken[0])
    reports.acknowledge()
    assert reports.has_room


def test_a_report_that_was_added_early_is_handled_once_and_acknowledged_in_the_order_of_the_stream() -> None:
    reports = waiting(message("flood", 1))
    reports.add_early(message("honest", 9))
    reports.add_early(message("honest", 9))
    assert sorted(take(reports)) == [1, 9]
    reports.finish(message("honest", 9))
    assert reports.acknowledge() is None
    reports.add([message("flood", 2), message("honest", 9), message("flood", 10)])
    assert take(reports) == [2, 10]
    reports.finish(message("flood", 1))
    reports.finish(message("flood", 2))
    acknowledged = reports.acknowledge()
    assert acknowledged.sequence == 9
    reports.add_early(message("honest", 9))
    assert not reports, "it was read since"


def test_an_older_report_of_a_subject_has_its_turn_behind_one_that_was_added_early() -> None:
    reports = waiting(message("honest", 1))
    reports.add_early(message("honest", 9))
    reports.add([message("honest", 5)])
    found = [reports.take() for _ in range(3)]
    assert [(message.sequence, is_newest) for message, is_newest in found] == [(1, False), (9, True), (5, False)]
