import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.plan import Schedule

ENTRIES = st.lists(
    st.tuples(st.integers(1, 50), st.tuples(st.integers(0, 9), st.integers(1, 9))), min_size=0, max_size=20
)


@given(ENTRIES, st.integers(0, 400))
def test_the_newest_entry_that_has_begun_rules_a_step(gaps: list[tuple[int, tuple[int, int]]], cut: int) -> None:
    schedule, rules, step = Schedule(Allocation((4, 4))), {0: (4, 4)}, 0
    for gap, sizes in gaps:
        step += gap
        schedule.revise(step, Allocation(sizes))
        rules[step] = sizes
    expected = [rules[max(start for start in rules if start <= at)] for at in range(step + 3)]
    assert [schedule.counts_at(at).values for at in range(step + 3)] == expected
    assert schedule.newest.local_batch_sizes == expected[-1]

    cut = min(cut, step)
    kept = schedule.entries_since(cut)
    schedule.drop_before(cut)
    assert schedule.entries_since(cut) == kept
    assert [schedule.counts_at(at).values for at in range(cut, step + 3)] == expected[cut:]


def test_what_comes_too_late_or_does_not_fit_is_refused() -> None:
    schedule = Schedule(Allocation((4, 4)))
    schedule.revise(10, Allocation((1, 2)))
    with pytest.raises(ValueError, match="an allocation for step 9 comes too late"):
        schedule.revise(9, Allocation((2, 1)))
    with pytest.raises(ValueError, match="3 sizes for 2 ranks"):
        schedule.revise(11, Allocation((1, 2, 3)))
    with pytest.raises(ValueError, match="without samples"):
        schedule.revise(11, Allocation((0, 0)))
    with pytest.raises(ValueError, match="before the schedule's first step"):
        Schedule(Allocation((1,)), first_step=5).counts_at(4)
    assert schedule.entries_since(0) == [(0, Allocation((4, 4))), (10, Allocation((1, 2)))]
