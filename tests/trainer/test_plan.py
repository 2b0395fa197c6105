"""Which samples each rank uses in each step: the schedule, the division of a step, and the order of an epoch."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.training import Numbered
from torch.utils.data import WeightedRandomSampler

from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.orders import Permutations, SampledOrders, epoch_order
from dynamix.trainer.data.plan import (
    Division,
    PlanSampler,
    Position,
    Schedule,
    StepPlan,
    divide_tail,
    largest_remainder,
)
from dynamix.trainer.steering.collectives import Collectives

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


WEIGHTS = st.lists(st.integers(0, 1024), min_size=1, max_size=64)


@given(WEIGHTS, st.integers(0, 10**6))
def test_a_division_loses_no_sample_and_stays_within_one_of_the_exact_share(weights: list[int], total: int) -> None:
    whole = sum(weights)
    if whole == 0:
        return
    shares = largest_remainder(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share * whole - total * weight) < whole
        assert weight > 0 or share == 0


@given(WEIGHTS, st.data())
def test_a_tail_gives_each_rank_two_samples_while_there_are_enough(sizes: list[int], data: st.DataObject) -> None:
    if sum(sizes) == 0:
        return
    total = data.draw(st.integers(0, sum(sizes)))
    shares = divide_tail(total, sizes)
    enough = min(2, total // sum(size > 0 for size in sizes))
    assert sum(shares) == total
    assert all(min(size, enough) <= share <= size for share, size in zip(shares, sizes, strict=True))


CHANGES = st.lists(
    st.tuples(st.integers(1, 6), st.tuples(*[st.integers(0, 40)] * 3).filter(lambda sizes: sum(sizes) > 0)), max_size=26
)


def _schedule(changes: list[tuple[int, tuple[int, int, int]]]) -> Schedule:
    """The sizes (8, 16, 4), and others after so many steps each."""
    schedule, step = Schedule(Allocation((8, 16, 4))), 0
    for gap, sizes in changes:
        step += gap
        schedule.revise(step, Allocation(sizes))
    return schedule


def _draw_epoch(num_samples: int, schedule: Schedule, position: Position) -> list[tuple[StepPlan, list[list[int]]]]:
    """Plans of an epoch's steps and each rank's indices."""
    samplers = [
        PlanSampler(Permutations(num_samples, 3, shuffle=True), schedule, division=Division(rank)) for rank in range(3)
    ]
    for sampler in samplers:
        sampler.rewind(position)
    drawn = [list(sampler) for sampler in samplers]
    plans = [[batch.plan for batch in sampler.drawn] for sampler in samplers]
    assert plans[0] == plans[1] == plans[2]
    return list(zip(plans[0], map(list, zip(*drawn, strict=True)), strict=True))


@given(st.integers(1, 700), CHANGES)
def test_each_sample_is_drawn_exactly_once_whatever_changes(
    num_samples: int, changes: list[tuple[int, tuple[int, int, int]]]
) -> None:
    schedule = _schedule(changes)
    used: list[int] = []
    for number, (plan, indices) in enumerate(_draw_epoch(num_samples, schedule, Position())):
        assert plan.step == number
        assert plan.offset == len(used)
        for rank, mine in enumerate(indices):
            count = plan.counts.values[rank]
            assert len(mine) == (count or 2)  # a rank without samples draws one twice, which counts for nothing
            assert count or len(set(mine)) == 1
            used += mine[:count]
    assert used == epoch_order(num_samples, 3, 0, shuffle=True).tolist()


@given(st.integers(1, 300), CHANGES, st.booleans(), st.sampled_from([None, 5]))
def test_the_number_of_batches_left_is_what_is_drawn(
    num_samples: int, changes: list[tuple[int, tuple[int, int, int]]], drop_last: bool, most: int | None
) -> None:
    orders = Permutations(num_samples, 0, shuffle=False)
    sampler = PlanSampler(orders, _schedule(changes), division=Division(0, most), drop_last=drop_last)
    assert sampler.num_batches_left(Position()) == len(list(sampler))
    for number, batch in enumerate(sampler.drawn):
        if batch.is_last and batch.plan.offset == 0:
            after = Position().after(batch.plan)
            assert sampler.num_batches_left(after) == len(sampler.drawn) - number - 1


@pytest.mark.parametrize(
    ("num_samples", "totals"), [(100, [28, 28, 28]), (84, [28, 28, 28]), (85, [28, 28, 28]), (28, [28]), (10, [10])]
)
def test_a_tail_can_be_left_out_but_never_the_whole_epoch(num_samples: int, totals: list[int]) -> None:
    orders = Permutations(num_samples, 0, shuffle=True)
    sampler = PlanSampler(orders, Schedule(Allocation((8, 16, 4))), division=Division(0), drop_last=True)
    assert sampler.num_batches_left(Position()) == len(totals)
    assert len(list(sampler)) == len(totals)
    assert [batch.plan.counts.total for batch in sampler.drawn] == totals
    assert sampler.is_over(Position().after(sampler.drawn[0].plan)) == (len(totals) == 1)


def test_a_sampler_draws_by_the_epoch_and_leaves_random_numbers_as_they_were() -> None:
    own = torch.Generator().manual_seed(3)
    weights = [1.0, 2.0, 3.0, 4.0]
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002 - what samplers may use
        random.seed(1)
        orders = SampledOrders(WeightedRandomSampler(weights, 50, generator=own), seed=5)
        orders.connect(Collectives(), Numbered(4), {})
        drawn.append([orders.order_of(epoch).tolist() for epoch in (0, 1)])
        found = torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        random.seed(1)
        assert found == (torch.rand(1).item(), np.random.rand(), random.random())  # noqa: NPY002
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]
    assert torch.equal(own.get_state(), torch.Generator().manual_seed(3).get_state())
