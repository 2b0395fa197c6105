"""The common order of three streams."""

from hypothesis import given
from hypothesis import strategies as st

from dynamix.recording.capture import Record, RecordMerge


def record(stream: str, sequence: int, timestamp_ns: int) -> Record:
    return Record(stream, sequence, timestamp_ns, "s", "", b"")


def order(records: list[Record]) -> list[tuple[str, int]]:
    return [(one.stream, one.sequence) for one in records]


def test_earlier_records_come_first_and_equal_times_follow_the_stream_order() -> None:
    merge = RecordMerge()
    for one in (record("ACTIONS", 1, 20), record("FEED", 5, 20), record("FEED", 9, 30), record("JOBS", 2, 20)):
        merge.add_record(one)
    assert order(list(merge.pop_until(20))) == [("JOBS", 2), ("FEED", 5), ("ACTIONS", 1)]
    assert merge.newest_ns("FEED") == 30
    assert merge.newest_ns("JOBS") == 20
    assert order(list(merge.pop_until())) == [("FEED", 9)]
    assert list(merge.pop_until()) == []


def test_a_clock_set_back_never_reorders_a_stream() -> None:
    merge = RecordMerge()
    for one in (record("FEED", 1, 100), record("FEED", 2, 40), record("ACTIONS", 1, 50), record("FEED", 3, 120)):
        merge.add_record(one)
    assert order(list(merge.pop_until())) == [("ACTIONS", 1), ("FEED", 1), ("FEED", 2), ("FEED", 3)]


@given(st.lists(st.tuples(st.sampled_from(("JOBS", "FEED", "ACTIONS")), st.integers(0, 30))), st.data())
def test_the_order_is_the_same_in_parts_and_at_once(steps: list[tuple[str, int]], data: st.DataObject) -> None:
    """For any sequence of times, if all records up to each time were added before."""
    now, stored = 0, []
    for sequence, (stream, wait_ns) in enumerate(steps, start=1):
        now += wait_ns
        stored.append(record(stream, sequence, now))
    at_once = RecordMerge()
    for one in stored:
        at_once.add_record(one)
    in_parts, found, taken = RecordMerge(), [], 0
    for frontier in sorted(data.draw(st.lists(st.integers(0, now + 1), max_size=5))):
        ahead = data.draw(st.integers(0, 3))
        due = sum(one.timestamp_ns <= frontier for one in stored)
        for one in stored[taken : due + ahead]:
            in_parts.add_record(one)
        taken = max(taken, min(len(stored), due + ahead))
        found += list(in_parts.pop_until(frontier))
    for one in stored[taken:]:
        in_parts.add_record(one)
    found += list(in_parts.pop_until())
    assert found == list(at_once.pop_until())
