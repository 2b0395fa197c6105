import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.trainer.data.schedule import Schedule

ENTRIES = st.lists(
    st.tuples(st.integers(1, 50), st.tuples(st.integers(0, 9), st.integers(1, 9))), min_size=0, max_size=20
)


@given(ENTRIES, st.integers(0, 400))
def test_the_newest_entry_that_has_begun_rules_a_step(gaps: list[tuple[int, tuple[int, int]]], cut: int) -> None:
    schedule, rules, step = Schedule([4, 4]), {0: (4, 4)}, 0
    for gap, sizes in gaps:
        step += gap
        schedule.add(step, sizes)
        rules[step] = sizes
    expected = [rules[max(start for start in rules if start <= at)] for at in range(step + 3)]
    assert [schedule.at(at).values for at in range(step + 3)] == expected
    assert schedule.newest.values == expected[-1]

    cut = min(cut, step)
    kept = schedule.since(cut)
    schedule.forget_before(cut)
    assert schedule.since(cut) == kept
    assert [schedule.at(at).values for at in range(cut, step + 3)] == expected[cut:]


def test_a_change_is_seen_ahead() -> None:
    schedule = Schedule([4, 4])
    schedule.add(7, [1, 1])
    assert [schedule.next_change(step) for step in (0, 6, 7)] == [7, 7, None]


def test_what_comes_too_late_or_does_not_fit_is_refused() -> None:
    schedule = Schedule([4, 4])
    schedule.add(10, [1, 2])
    with pytest.raises(ValueError, match="sizes for step 10 come too late"):
        schedule.add(10, [2, 1])
    with pytest.raises(ValueError, match="3 sizes for 2 ranks"):
        schedule.add(11, [1, 2, 3])
    with pytest.raises(ValueError, match="without samples"):
        schedule.add(11, [0, 0])
    with pytest.raises(ValueError, match="before the schedule's first step"):
        Schedule([1], first_step=5).at(4)
    assert schedule.since(0) == [(0, (4, 4), "fixed"), (10, (1, 2), "fixed")]
