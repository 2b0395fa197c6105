"""Which reading a difference is taken against."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.captured_proc import Clock

from dynamix.collector.procfs.intervals import FORGET_AFTER_S, MAX_KEYS, Intervals, WindowId


def at(window: int, job: str = "job", generation: int = 0) -> WindowId:
    return WindowId(job, generation, window)


def test_the_reading_before_and_the_seconds_since_are_given_back() -> None:
    clock = Clock()
    intervals = Intervals[int](clock)
    assert intervals.exchange("cpu", 10, at(0)) is None
    clock.now_s += 2.5
    assert intervals.exchange("cpu", 14, at(1)) == (10, 2.5)
    clock.now_s += 0.5
    assert intervals.exchange("cpu", 15, at(2)) == (14, 0.5)


def test_a_window_delivered_again_changes_nothing() -> None:
    clock = Clock()
    intervals = Intervals[int](clock)
    readings = ((4, 40), (5, 50), (5, 51), (4, 52), (6, 60))
    found = []
    for window, value in readings:
        clock.now_s += 1.0
        found.append(intervals.exchange("cpu", value, at(window)))
    assert found == [None, (40, 1.0), None, None, (50, 3.0)]


def test_what_is_not_read_for_an_hour_is_forgotten() -> None:
    clock = Clock()
    intervals = Intervals[int](clock)
    intervals.exchange("old", 1, at(0, "old"))
    clock.now_s += FORGET_AFTER_S / 2
    intervals.exchange("kept", 2, at(0, "kept"))
    clock.now_s += FORGET_AFTER_S / 2 + 1
    assert intervals.exchange("kept", 3, at(1, "kept")) == (2, FORGET_AFTER_S / 2 + 1)
    assert list(intervals._last) == ["kept"]
    assert intervals.exchange("old", 4, at(5, "old")) is None


def test_of_endless_keys_the_oldest_is_forgotten() -> None:
    clock = Clock()
    intervals = Intervals[int](clock)
    for number in range(MAX_KEYS + 1):
        clock.now_s += 1e-3
        intervals.exchange(number, 0, at(0))
    assert len(intervals._last) == MAX_KEYS
    clock.now_s += 1.0
    assert intervals.exchange(0, 1, at(1)) is None
    assert intervals.exchange(MAX_KEYS, 1, at(1)) is not None


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 12)), max_size=60))
def test_a_difference_is_known_only_after_a_reading_of_the_previous_window(
    deliveries: list[tuple[str, int, int]],
) -> None:
    clock = Clock()
    intervals = Intervals[float](clock)
    newest: dict[str, WindowId] = {}
    first_read_at_s: dict[WindowId, float] = {}
    for job, generation, window in deliveries:
        clock.now_s += 1.0
        key = WindowId(job, generation, window)
        found = intervals.exchange((job, "cpu"), clock.now_s, key)
        if job in newest and key <= newest[job]:
            assert found is None
            continue
        before = key._replace(window=window - 1)
        if newest.get(job) == before:
            assert found == (first_read_at_s[before], pytest.approx(clock.now_s - first_read_at_s[before]))
        else:
            assert found is None
        newest[job], first_read_at_s[key] = key, clock.now_s
