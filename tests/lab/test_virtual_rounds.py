"""Local steps of virtual ranks: what they send, how long they take, and what is evaluated between two averagings."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support import virtual

from dynamix.lab.simulator.clock import Conditions, VirtualClock
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.exchange import BucketTraffic, CodedAs, CollectiveTraffic, StepTraffic
from dynamix.lab.simulator.scenario import Network, Scenario, Workers
from dynamix.schemas.messages.allocation import EXACT, Exchange

LONG = {"fixed_time_s": 1e3, "time_limit_s": 1e6, "evaluate_every_s": 1e6}


def local(**changes: Any) -> Scenario:
    return virtual.scenario(exchange="local", **(LONG | changes))


def started(every: int, of: Scenario, **arguments: Any) -> VirtualCluster:
    """A cluster with local steps from the first one on."""
    return virtual.cluster(of, policy_options={"every": every}, **arguments)


def own_parameters(run: VirtualCluster) -> torch.Tensor:
    """The parameters of all ranks, a row each."""
    ranks = run._rounds._ranks
    assert ranks is not None
    return ranks.parameters.detach()


def test_a_round_takes_as_long_as_the_rank_that_computed_longest_in_all_of_it() -> None:
    workers = (Workers(samples_per_s=1000.0), Workers(samples_per_s=1000.0))
    clock = VirtualClock(virtual.scenario(workers=workers, network=Network(latency_s=0.0, overlap=1.0)), 1000)
    calm = Conditions(np.ones(2), np.ones(2), np.zeros(2, dtype=bool))
    ring = CollectiveTraffic(np.full(2, 1.25e6), np.full(2, 1.25e6), is_ring=True, num_messages=0)
    sent = StepTraffic((BucketTraffic((ring,), CodedAs("none", 1.25e6)),))
    # 10 and 30 ms, then 30 and 10 ms; 1.25 MB over 1.25 GB/s, none of it hidden, whatever the overlap is
    first = clock.local_step(np.array([10.0, 30.0]), calm, np.zeros(2))
    last = clock.local_step(np.array([30.0, 10.0]), calm, first.compute_s, decided=True, traffic=sent)
    assert (first.step_s, first.sync_s.tolist(), first.communication_s) == (0.030, [0.0, 0.0], 0.0)
    assert last.step_s == pytest.approx(0.010 + 0.001 + clock.decision_s)
    assert last.sync_s == pytest.approx([0.001, 0.001])
    late = clock.local_step(np.array([10.0, 10.0]), calm, np.array([0.010, 0.030]), traffic=sent)
    assert late.step_s == pytest.approx(0.010 + 0.001)
    assert late.sync_s == pytest.approx([0.020 + 0.001, 0.001])


def test_only_the_last_step_of_a_round_sends_anything() -> None:
    run = started(4, local(window_steps=1, network=Network(num_buckets=1, gradient_bytes=1_000_000)))
    counters = [run.run_window()[0].rows[2].sockets for _ in range(8)]
    ring, sketch = 1_500_000, 6 * 8192  # of 8192 numbers that measure the noise
    first = ring + sketch
    # step 8 ends the epoch: the optimizer's momentum is averaged as well
    assert [each.tx_bytes for each in counters if each] == [0, 0, 0, first, first, first, first, 2 * first + ring]


def test_what_is_evaluated_between_two_averagings_is_the_mean_by_samples() -> None:
    run = started(4, local(window_steps=1))
    sizes = torch.tensor([8.0, 24.0, 40.0, 56.0])
    run.run_window()
    run.offer(virtual.action(run.job, 0, (8, 24, 40, 56), exchange=Exchange(every=4)))
    run.run_window()
    rows = own_parameters(run).clone()
    assert not torch.equal(rows[0], rows[1])
    run.run_window()
    shown = run._gradients.parameters.detach()
    weights = (2 * torch.full((4,), 32.0) + sizes) / (3 * 128)
    assert torch.allclose(shown, weights @ own_parameters(run), atol=1e-6)
    run.run_window()
    assert all(torch.equal(row, run._gradients.parameters.detach()) for row in own_parameters(run))


def test_a_round_ends_with_an_epoch_and_before_another_exchange_rules() -> None:
    run = started(100, local(window_steps=4, lag_windows=1))  # 1000 samples: 8 steps of 128
    ends = []
    for window in range(4):
        if window == 3:
            run.offer(virtual.action(run.job, 1, (32,) * 4, exchange=EXACT))
        for _ in range(4):
            run._step()
            if run._rounds._num_steps == 0:
                ends.append((run.position.step, run._rounds.is_begun))
    assert [(applied.exchange, applied.effective_step) for applied in run.applied] == [(EXACT, 16)]
    assert ends == [(8, True), (16, False)]


def test_speeds_are_known_where_a_round_ends() -> None:
    run = started(5, local(window_steps=10), data=virtual.data(6000))  # no epoch ends
    seen: list[int] = []
    told: list[tuple[Any, Any]] = []
    observe = run._fast_loop.observe_times

    def spy(seconds: Any, step: int, counts: Any) -> None:
        seen.append(step)
        told.append((seconds, counts))
        observe(seconds, step, counts)

    run._fast_loop.observe_times = spy  # type: ignore[method-assign,assignment]
    run.run_window()
    run.offer(virtual.action(run.job, 0, (32,) * 4, split="tracking", exchange=Exchange(every=5)))
    for _ in range(3):
        run.run_window()
    assert seen
    assert all(step % 5 == 0 for step in seen)
    worker = run.scenario.per_worker[0]
    size = 32  # of all four, in the first round that divides
    assert told[0][1][0] == size
    assert told[0][0][0] == pytest.approx(worker.overhead_s / size + 1 / worker.samples_per_s)


def test_the_noise_is_that_of_ranks_which_have_the_same_parameters() -> None:
    run = started(5, local(window_steps=5, noise_every=1))
    exact = virtual.cluster(local(window_steps=1, noise_every=1))
    sums = run.run_window()[0].totals.noise, exact.run_window()[0].totals.noise
    assert sums[0] is not None
    assert sums[1] is not None  # of the first step alone, from whole gradients instead of sketches
    assert sums[0].trace == pytest.approx(sums[1].trace, rel=0.02)
    assert sums[0].squared_norm == pytest.approx(sums[1].squared_norm, rel=0.1)


def test_drift_is_how_far_ranks_came_apart_over_how_far_their_mean_moved() -> None:
    run = started(4, local(window_steps=4))
    moves = []
    sum_moves = run._exchange.sum_moves
    run._exchange.sum_moves = lambda rows, *others: (moves.append(4 * rows), sum_moves(rows, *others))[1]  # type: ignore[method-assign,func-returns-value]
    drift = run.run_window()[0].totals.drift
    assert drift is not None
    mean = moves[0].mean(0)
    assert drift.moved == pytest.approx(float(mean.square().sum()), rel=1e-4)
    assert drift.spread == pytest.approx(float((moves[0] - mean).square().sum(1).mean()), rel=1e-4)
    assert 0.1 < drift.ratio < 3.0  # 3 where ranks move without any common direction
    assert virtual.cluster(local()).run_window()[0].totals.drift is None


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_local_steps_learn(optimizer: str) -> None:
    rate = 0.05 if optimizer == "sgd" else 0.002
    run = started(4, virtual.scenario(exchange="local", optimizer=optimizer, learning_rate=rate, time_limit_s=9.0))
    while run.run_window():
        pass
    assert run.time_to_target_s is not None
    assert run.test_accuracy() > 0.5


def test_a_job_without_permission_refuses_local_steps() -> None:
    run = virtual.cluster(virtual.scenario(exchange="lossy", **LONG))
    run.run_window()
    run.offer(virtual.action(run.job, 0, (32,) * 4, exchange=Exchange(every=4)))
    run.run_window()
    run.run_window()
    assert run.num_refused == {"lever": 1}
    with pytest.raises(ValueError, match="which this job does not permit"):
        started(4, virtual.scenario(exchange="lossy"))
