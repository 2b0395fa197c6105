"""Step times of the virtual clock, by known numbers and against a simulation message by message."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import pytest
from tests.support import virtual

from dynamix.lab.simulator.clock import SLOW, Conditions, Disturbances, Switching, VirtualClock
from dynamix.lab.simulator.scenario import Congestion, DecisionCost, Network, Scenario, Workers

CALM = Conditions(np.ones(4), np.ones(4), np.zeros(4, dtype=bool))
SIZES = np.array([64.0, 64.0, 64.0, 32.0])
WORKERS = (
    Workers(samples_per_s=4000.0, overhead_s=0.002, count=2),
    Workers(samples_per_s=2000.0, overhead_s=0.001),
    Workers(samples_per_s=500.0, overhead_s=0.004, bandwidth_mbit_s=400.0),
)


def clock(workers: tuple[Workers, ...] = WORKERS, **network: Any) -> VirtualClock:
    chosen = {"bandwidth_mbit_s": 800.0, "latency_s": 0.001, "overlap": 0.0, "num_buckets": 1} | network
    scenario = Scenario(
        family="made",
        workload="fashion-14-mlp",
        workers=workers,
        target_accuracy=0.5,
        fixed_time_s=1.0,
        time_limit_s=2.0,
        network=Network(**chosen),
        decision=DecisionCost(cost_s=0.001, cost_per_doubling_s=0.0005),
    )
    return VirtualClock(scenario, gradient_bytes=1_000_000)


def test_compute_is_overhead_and_samples_over_rate_and_a_slowdown_touches_all_of_it() -> None:
    conditions = CALM._replace(slowdown=np.array([1.0, 3.0, 1.0, 0.5]))
    timing = clock().step(SIZES, conditions)
    # 2 ms + 64/4000; 3 * (2 ms + 64/4000); 1 ms + 64/2000; 0.5 * (4 ms + 32/500)
    assert timing.compute_s == pytest.approx([0.018, 0.054, 0.033, 0.034], rel=1e-12)


def test_a_batch_below_the_saturation_costs_no_less_and_one_above_it_no_more() -> None:
    workers = tuple(Workers(samples_per_s=1000.0, overhead_s=0.002, saturation=samples) for samples in (0, 32, 64, 96))
    timing = clock(workers).step(np.array([16.0, 16.0, 64.0, 128.0]), CALM._replace(slowdown=np.array([1, 2, 1, 1])))
    assert timing.compute_s == pytest.approx([0.018, 2 * 0.034, 0.066, 0.130], rel=1e-12)


def test_servers_take_the_parts_of_all_workers_over_one_link() -> None:
    # one server: 2 * 4 MB over 100 MB/s, and two latencies
    assert clock(topology="parameter-server").communication_s(CALM) == pytest.approx(0.082, rel=1e-12)
    # ten servers: the slow worker's own 1 MB over 50 MB/s takes longer than 0.4 MB over 100 MB/s
    many = clock(topology="parameter-server", num_servers=10)
    assert many.communication_s(CALM) == pytest.approx(2 * 0.02 + 0.002, rel=1e-12)
    many = clock(topology="parameter-server", num_servers=10, num_buckets=3)
    assert many.communication_s(CALM) == pytest.approx(2 * 0.02 + 3 * 0.002, rel=1e-12)


def test_congestion_slows_messages_as_a_whole_and_a_server_suffers_only_where_all_links_do() -> None:
    fast_link = CALM._replace(congestion=np.array([4.0, 1.0, 1.0, 1.0]))
    # 100/4 = 25 MB/s is slower than the slow link's 50 MB/s
    assert clock().communication_s(fast_link) == pytest.approx(0.060, rel=1e-12)
    # of five buckets a part is sent in (2, 0.5, 0.5, 1) ms, after (4, 1, 1, 1) ms: 6 * 5 * (4 + 7) / 4 ms
    assert clock(num_buckets=5).communication_s(fast_link) == pytest.approx(0.0825, rel=1e-12)
    servers = clock(topology="parameter-server")
    # its own 1 MB over 25 MB/s after 4 ms, longer than four over 100 MB/s after 1 ms
    assert servers.communication_s(fast_link) == pytest.approx(2 * (0.04 + 0.004), rel=1e-12)
    everywhere = CALM._replace(congestion=np.full(4, 4.0))
    assert servers.communication_s(everywhere) == pytest.approx(4 * servers.communication_s(CALM), rel=1e-12)
    assert clock(num_buckets=5).communication_s(everywhere) == pytest.approx(4 * 0.04875, rel=1e-12)


def ring_step_s(
    compute_s: Sequence[float],
    sending_s: Sequence[float],
    latency_s: Sequence[float],
    *,
    num_buckets: int,
    overlap: float,
) -> float:
    """A step, message by message: each worker sends the next part of a bucket once it has the one before, and has
    computed the bucket; its link takes `sending_s` for a part of a bucket, and the part arrives a latency later.
    """
    num_workers, num_rounds = len(compute_s), 2 * (len(compute_s) - 1)
    left = [(num_buckets - 1 - bucket) / max(1, num_buckets - 1) for bucket in range(num_buckets)]
    ready_s = [[time_s * (1 - overlap * share) for share in left] for time_s in compute_s]
    sent, received, free_s = [0] * num_workers, [0] * num_workers, [0.0] * num_workers
    events = [(ready, worker, 0) for worker, times_s in enumerate(ready_s) for ready in times_s]
    heapify(events)
    now_s = 0.0
    while events:
        now_s, worker, num_arrived = heappop(events)
        received[worker] += num_arrived
        while sent[worker] <= received[worker] and sent[worker] < num_rounds * num_buckets:
            if ready_s[worker][sent[worker] // num_rounds] > now_s:
                break
            free_s[worker] = max(now_s, free_s[worker]) + sending_s[worker]
            heappush(events, (free_s[worker] + latency_s[worker], (worker + 1) % num_workers, 1))
            sent[worker] += 1
    assert received == [num_rounds * num_buckets] * num_workers
    return now_s


def random_step(seed: int, *, equal_links: bool) -> tuple[float, float]:
    """The time of a step of a random cluster: by the formulas, and message by message."""
    random = np.random.default_rng(seed)
    num_workers, num_buckets = int(random.integers(2, 9)), int(random.integers(1, 7))
    latency_s, overlap = random.uniform(0, 0.002), random.uniform(0, 1)
    links = np.full(num_workers, 400.0) if equal_links else random.uniform(100, 1000, num_workers)
    congestion = np.full(num_workers, 3.0) if equal_links else random.choice([1.0, 3.0], num_workers)
    workers = tuple(
        Workers(
            samples_per_s=random.uniform(200, 2000),
            overhead_s=random.uniform(0.001, 0.04),
            saturation=int(random.integers(0, 100)),
            bandwidth_mbit_s=link,
        )
        for link in links.tolist()
    )
    conditions = Conditions(random.choice([1.0, 2.5], num_workers), congestion, congestion > 1)
    made = clock(workers, latency_s=latency_s, overlap=overlap, num_buckets=num_buckets)
    timing = made.step(random.integers(1, 129, num_workers).astype(float), conditions)
    sending_s = congestion * 1_000_000 / num_buckets / num_workers / (links * 1e6 / 8)
    latencies_s = congestion * latency_s
    return timing.step_s, ring_step_s(
        timing.compute_s.tolist(), sending_s.tolist(), latencies_s.tolist(), num_buckets=num_buckets, overlap=overlap
    )


def test_the_formulas_are_what_messages_take_where_links_are_alike_and_nearly_where_they_are_not() -> None:
    for seed in range(60):
        formula_s, messages_s = random_step(seed, equal_links=True)
        assert formula_s == pytest.approx(messages_s, rel=1e-9)
    errors = [
        formula_s / messages_s - 1 for formula_s, messages_s in (random_step(n, equal_links=False) for n in range(60))
    ]
    assert np.median(np.abs(errors)) < 0.01
    assert np.quantile(np.abs(errors), 0.9) < 0.05
    assert max(map(abs, errors)) < 0.2


EIGHT = (virtual.Workers(count=8, samples_per_s=1000.0),)


def test_what_is_slow_depends_on_the_time_and_not_on_when_one_looked() -> None:
    often = Switching(5, SLOW, 8, off_s=2.0, on_s=1.0)
    seldom = Switching(5, SLOW, 8, off_s=2.0, on_s=1.0)
    for tick in range(1000):
        state = often.at(tick * 0.05)
        if tick % 111 == 0:
            assert (seldom.at(tick * 0.05) == state).all()


@pytest.mark.parametrize("shared", [True, False])
def test_congestion_is_of_the_whole_network_or_of_single_links(shared: bool) -> None:
    congestion = Congestion(factor=8.0, mean_clear_s=2.0, mean_congested_s=1.0, shared=shared)
    disturbances = Disturbances(virtual.scenario(workers=EIGHT, congestion=congestion), 2)
    seen = [disturbances.at(step, step * 0.5) for step in range(200)]
    assert {float(factor) for conditions in seen for factor in conditions.congestion} == {1.0, 8.0}
    assert all(((c.congestion == 8.0) == c.congested).all() for c in seen)
    assert all(len(set(c.congestion.tolist())) == 1 for c in seen) == shared
