"""The field of a job with the nodes a (ranks 0, 1) and b (ranks 2, 3), and what follows from it."""

import pytest
from tests.support import examples

from dynamix.schemas.messages import FieldView, NodeRanks, SeenTrace, Trace
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.policies import STIGMERGY_OPTIONS
from dynamix.trainer.data.plan import Schedule
from dynamix.trainer.steering.field import TraceField

NODES = (NodeRanks(node="a", ranks=(0, 1)), NodeRanks(node="b", ranks=(2, 3)))
UPPER = (100,) * 4
EQUAL = (20, 20, 20, 20)


def trace(node: str, activity: float, window: int = 0, appetite: float = 80.0) -> Trace:
    ranks = {"a": (0, 1), "b": (2, 3)}[node]
    return examples.trace(node, ranks, window, activity=(activity,) * 2, appetite=appetite, waiting_s=0.25)


def seen_by_all(*, keeps_global_batch: bool, rate_exponent: float) -> FieldView:
    return FieldView(
        activity=(),
        own=None,
        keeps_global_batch=keeps_global_batch,
        rate_exponent=rate_exponent,
        options=STIGMERGY_OPTIONS,
        base_global_batch_size=80,
    )


def field(*, keeps_global_batch: bool = True) -> TraceField:
    return TraceField(NODES, seen_by_all(keeps_global_batch=keeps_global_batch, rate_exponent=0.5))


def laid(*traces: Trace, window: int = 2, keeps_global_batch: bool = True) -> TraceField:
    """A field with these traces, as it rules from a window on."""
    made = field(keeps_global_batch=keeps_global_batch)
    made.take(made.numbers_of({one.node: one for one in traces}), window)
    return made


def test_the_global_batch_is_divided_in_proportion_to_the_activities() -> None:
    assert laid(trace("a", 300.0), trace("b", 100.0)).better_sizes(EQUAL, 1, UPPER) == (30, 30, 10, 10)


def test_the_sum_over_ranks_is_the_field_of_all_nodes() -> None:
    mine, theirs, both = trace("a", 300.1, window=5), trace("b", 99.9, window=3), field()
    summed = [
        one + other + nothing
        for one, other, nothing in zip(
            both.numbers_of({"a": mine}), both.numbers_of({"b": theirs}), both.numbers_of({}), strict=True
        )
    ]
    assert summed == both.numbers_of({"a": mine, "b": theirs})
    assert summed == [300.1, 300.1, 99.9, 99.9, 80.0, 0.25, 6.0, 80.0, 0.25, 4.0]


def test_a_trace_is_gone_after_seven_windows_without_a_newer_one() -> None:
    """0.5^6 is 0.016 and 0.5^7 is 0.008: below a hundredth."""
    for window, expected in ((8, (30, 30, 10, 10)), (9, None)):
        made = laid(trace("a", 300.0), trace("b", 100.0), window=window)
        assert made.better_sizes(EQUAL, 1, UPPER) == expected
    assert made.view("a").own is None
    assert made.view("a").activity == (0.0, 0.0)


def test_ranks_without_a_trace_keep_their_share() -> None:
    adaptive = laid(trace("a", 300.0, appetite=160.0), keeps_global_batch=False)
    assert adaptive.better_sizes((30, 30, 10, 10), 1, UPPER) == (60, 60, 20, 20)
    fixed = laid(trace("a", 300.0))
    assert fixed.better_sizes((30, 30, 10, 10), 1, UPPER) is None


def test_the_appetite_of_an_agent_that_died_counts_for_less() -> None:
    """(100 + 0.5 * 40) / 1.5 = 80."""
    made = laid(
        trace("a", 100.0, window=3, appetite=100.0),
        trace("b", 100.0, window=2, appetite=40.0),
        window=5,
        keeps_global_batch=False,
    )
    assert made.better_sizes((10,) * 4, 1, UPPER) == EQUAL


@pytest.mark.parametrize(("appetite", "expected"), [(83.0, None), (90.0, (23, 23, 22, 22))])
def test_within_the_dead_band_the_global_batch_stays(appetite: float, expected: tuple[int, ...] | None) -> None:
    traces = trace("a", 100.0, appetite=appetite), trace("b", 100.0, appetite=appetite)
    assert laid(*traces, keeps_global_batch=False).better_sizes(EQUAL, 1, UPPER) == expected


def test_without_traces_nothing_changes() -> None:
    schedule = Schedule(Allocation(EQUAL, "traces"))
    laid().revise(schedule, 10, 1, UPPER)
    assert schedule.num_changes == 1
    laid(trace("a", 300.0), trace("b", 100.0)).revise(schedule, 10, 1, UPPER)
    assert schedule.allocation_at(9) == Allocation(EQUAL, "traces")
    assert schedule.allocation_at(10) == Allocation((30, 30, 10, 10), "traces")


def test_an_agent_sees_its_own_cell_and_those_beside_it_only() -> None:
    nodes = tuple(NodeRanks(node=f"n{index}", ranks=(index,)) for index in range(5))
    ring = TraceField(nodes, seen_by_all(keeps_global_batch=False, rate_exponent=0.0))
    left = {
        f"n{index}": examples.trace(
            f"n{index}", (index,), 1, activity=(1.0 + index,), appetite=float(index), waiting_s=0.0
        )
        for index in range(5)
    }
    ring.take(ring.numbers_of(left), 4)
    view = ring.view("n0")
    assert (view.activity, view.base_global_batch_size) == ((1.0,), 80)
    assert view.own == SeenTrace(strength=0.5, appetite=0.0, waiting_s=0.0)
    assert [seen.appetite for seen in view.around] == [1.0, 4.0]
    assert laid(trace("a", 1.0)).view("b").around == (SeenTrace(strength=1.0, appetite=80.0, waiting_s=0.25),)
