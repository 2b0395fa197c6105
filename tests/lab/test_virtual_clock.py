from typing import Any

import numpy as np
import pytest

from dynamix.lab.simulator.clock import VirtualClock
from dynamix.lab.simulator.disturbances import Conditions
from dynamix.lab.simulator.scenario import DecisionCost, Network, Scenario, Workers

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


def test_compute_is_overhead_and_samples_over_rate_and_slowdown_touches_the_samples_only() -> None:
    conditions = CALM._replace(slowdown=np.array([1.0, 3.0, 1.0, 0.5]))
    timing = clock().step(SIZES, conditions)
    # 2 ms + 64/4000; 2 ms + 3 * 64/4000; 1 ms + 64/2000; 4 ms + 0.5 * 32/500
    assert timing.compute_s == pytest.approx([0.018, 0.050, 0.033, 0.036], rel=1e-12)


def test_a_ring_moves_the_gradient_twice_around_at_the_pace_of_its_slowest_link() -> None:
    timing = clock().step(SIZES, CALM)
    # 2 * 3/4 * 1 MB over 50 MB/s, and 2 * 3 latencies of 1 ms
    assert timing.communication_s == pytest.approx(0.036, rel=1e-12)
    # the slowest computes 4 ms + 32/500 = 68 ms
    assert timing.step_s == pytest.approx(0.068 + 0.036, rel=1e-12)
    assert timing.sync_s == pytest.approx([0.050 + 0.036, 0.050 + 0.036, 0.035 + 0.036, 0.036], rel=1e-12)


def test_servers_take_the_parts_of_all_workers_over_one_link() -> None:
    # one server: 2 * 4 MB over 100 MB/s, and two latencies
    assert clock(topology="parameter-server").communication_s(CALM) == pytest.approx(0.082, rel=1e-12)
    # ten servers: the slow worker's own 1 MB over 50 MB/s takes longer than 0.4 MB over 100 MB/s
    many = clock(topology="parameter-server", num_servers=10)
    assert many.communication_s(CALM) == pytest.approx(2 * 0.02 + 0.002, rel=1e-12)


def test_congestion_divides_bandwidths_and_a_server_suffers_only_where_all_links_do() -> None:
    fast_links = CALM._replace(congestion=np.array([4.0, 1.0, 1.0, 1.0]))
    # 100/4 = 25 MB/s is slower than the slow link's 50 MB/s: 1.5 MB / 25 MB/s + 6 ms
    assert clock().communication_s(fast_links) == pytest.approx(0.066, rel=1e-12)
    servers = clock(topology="parameter-server")
    assert servers.communication_s(fast_links) == pytest.approx(2 * 0.04 + 0.002, rel=1e-12)
    everywhere = CALM._replace(congestion=np.full(4, 4.0))
    assert servers.communication_s(everywhere) == pytest.approx(2 * 0.16 + 0.002, rel=1e-12)


@pytest.mark.parametrize(
    ("overlap", "num_buckets", "exposed_s"),
    [(0.0, 4, 0.036), (0.25, 4, 0.036 - 0.25 * 0.068), (0.25, 1, 0.036), (1.0, 4, 0.009), (0.5, 100, 0.002)],
)
def test_what_travels_beside_computing_is_hidden_but_never_the_last_bucket(
    overlap: float, num_buckets: int, exposed_s: float
) -> None:
    timing = clock(overlap=overlap, num_buckets=num_buckets).step(SIZES, CALM)
    assert timing.step_s - timing.compute_s.max() == pytest.approx(exposed_s, rel=1e-12)


def test_every_workers_parts_add_up_to_the_step() -> None:
    timing = clock(overlap=0.3, num_buckets=3).step(SIZES, CALM, decided=True)
    assert timing.update_s == pytest.approx(0.001 + 0.0005 * 2, rel=1e-12)  # log2 of 4 workers
    assert timing.compute_s + timing.sync_s + timing.update_s == pytest.approx(timing.step_s, rel=1e-12)


def test_a_worker_alone_reduces_nothing_and_pays_decisions_without_doublings() -> None:
    alone = clock((Workers(samples_per_s=1000.0),))
    one = Conditions(np.ones(1), np.ones(1), np.zeros(1, dtype=bool))
    timing = alone.step(np.array([10.0]), one, decided=True)
    assert (timing.communication_s, alone.tx_bytes_per_step) == (0.0, 0.0)
    assert timing.step_s == pytest.approx(0.01 + 0.001, rel=1e-12)


def test_a_pretended_gradient_replaces_the_models() -> None:
    assert clock().tx_bytes_per_step == 1_500_000
    assert clock(gradient_bytes=8_000_000).tx_bytes_per_step == 12_000_000
    assert clock(topology="parameter-server").tx_bytes_per_step == 1_000_000
