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
from dynamix.trainer.data.plan import Division, PlanSampler, Position, Schedule, StepPlan
from dynamix.trainer.steering.collectives import Collectives

CHANGES = st.lists(
    st.tuples(st.integers(1, 6), st.tuples(*[st.integers(0, 40)] * 3).filter(lambda sizes: sum(sizes) > 0)), max_size=26
)


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
    schedule, step = Schedule(Allocation((8, 16, 4))), 0
    for gap, sizes in changes:
        step += gap
        schedule.revise(step, Allocation(sizes))
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


@given(st.integers(1, 300), CHANGES, st.booleans())
def test_the_number_of_steps_left_is_what_is_drawn(
    num_samples: int, changes: list[tuple[int, tuple[int, int, int]]], drop_last: bool
) -> None:
    schedule, step = Schedule(Allocation((8, 16, 4))), 0
    for gap, sizes in changes:
        step += gap
        schedule.revise(step, Allocation(sizes))
    sampler = PlanSampler(
        Permutations(num_samples, 0, shuffle=False), schedule, division=Division(0), drop_last=drop_last
    )
    assert sampler.num_batches_left(Position()) == len(list(sampler))


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
