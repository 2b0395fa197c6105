"""The virtual cluster: steps, windows and evaluations by known numbers, and against real ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support import virtual
from tests.support.ranks import run_ranks
from tests.support.training import flat_parameters, offer
from tests.support.virtual import FREE, action, cluster, data, scenario
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dynamix.lab.simulator.cluster import VirtualCluster, training_part
from dynamix.lab.simulator.scenario import Network, Workers
from dynamix.lab.workloads import make_optimizer, workload_named
from dynamix.schemas.messages.allocation import EXACT, Allocation, Exchange
from dynamix.trainer import attach

LONG = {"fixed_time_s": 1e3, "time_limit_s": 1e6, "evaluate_every_s": 1e6}
OTHER = (8, 24, 40, 56)


@pytest.mark.parametrize("lag_windows", [0, 1, 3])
def test_the_action_of_a_window_rules_once_the_lag_is_over(lag_windows: int) -> None:
    run = cluster(scenario(lag_windows=lag_windows, **LONG))
    ruled = []
    for window in range(6):
        report = run.run_window()[0]
        ruled.append(tuple(row.local_batch_size for row in report.rows))
        if window == 1:
            run.offer(action(run.job, 1, OTHER))
    first = 2 + lag_windows
    assert ruled == [(32,) * 4] * first + [OTHER] * (6 - first)
    applied = run.applied[0]
    assert (applied.decided_window, applied.effective_window, applied.effective_step) == (1, first, 5 * first)


def test_a_window_adds_up_what_its_steps_cost() -> None:
    workers = (Workers(samples_per_s=1000.0, overhead_s=0.004), Workers(samples_per_s=2000.0, overhead_s=0.002))
    network = Network(bandwidth_mbit_s=80.0, latency_s=0.0, overlap=0.0, num_buckets=1, gradient_bytes=50_000)
    run = cluster(scenario(workers=workers, network=network, lag_windows=0, decision=FREE, **LONG))
    report = run.run_window()[0]
    # 4 ms + 32/1000 and 2 ms + 32/2000; 50,000 bytes over 10 MB/s
    first, second = report.rows
    assert first.compute_time_s == pytest.approx(5 * 0.036)
    assert first.sync_time_s == pytest.approx(5 * 0.005)
    assert second.compute_time_s == pytest.approx(5 * 0.018)
    assert second.sync_time_s == pytest.approx(5 * 0.023)
    assert report.totals.time_s == pytest.approx(5 * 0.041)
    assert run.time_s == pytest.approx(5 * 0.041)
    assert (first.num_samples, report.totals.num_samples, report.samples_seen) == (160, 320, 320)
    assert [system.cpu_time_ratio for system in report.simulated] == pytest.approx([36 / 41, 18 / 41])
    assert [system.memory_ratio for system in report.simulated] == [32 / 1024, 32 / 1024]
    assert (first.sockets.tx_bytes, first.sockets.retransmits) == (250_000, 0)


def cost_of(*decisions: Allocation) -> float:
    """What some decisions, one per window, cost a run in virtual seconds."""
    free, paid = (cluster(scenario(lag_windows=0, decision=cost, **LONG)) for cost in (FREE, virtual.DecisionCost()))
    for run in (free, paid):
        for window, decided in enumerate(decisions):
            run.run_window()
            sizes, split = decided.local_batch_sizes, decided.split
            run.offer(action(run.job, window, sizes, split=split))
        for _ in range(2):
            run.run_window()
        assert len(run.applied) == len(decisions)
    return paid.time_s - free.time_s


def test_another_allocation_costs_its_step_once_and_one_that_changes_nothing_costs_nothing() -> None:
    once, same = 0.001 + 0.0001 * 2, (32,) * 4
    assert cost_of(Allocation(OTHER)) == pytest.approx(once)
    assert cost_of(Allocation(OTHER), Allocation(same)) == pytest.approx(2 * once)
    assert cost_of(Allocation(same), Allocation(same)) == 0.0
    # the fast loop begins once; another split of the same sum is its own, and free
    tracking = Allocation(same, split="tracking")
    assert cost_of(tracking, tracking, Allocation(OTHER, split="tracking")) == pytest.approx(once)


def test_the_grid_of_virtual_time_sees_the_parameters_in_force() -> None:
    run = cluster(scenario(window_steps=1, evaluate_every_s=0.05, time_limit_s=1.0, target_accuracy=1.0))
    accuracies = [(0.0, _accuracy(run))]
    while run.run_window():
        accuracies.append((run.time_s, _accuracy(run)))
    assert [evaluation.time_s for evaluation in run.evaluations] == pytest.approx(np.arange(1, 21) * 0.05)
    for evaluation in run.evaluations:
        expected = [accuracy for time_s, accuracy in accuracies if time_s <= evaluation.time_s][-1]
        assert evaluation.accuracy == expected


def _accuracy(run: VirtualCluster) -> float:
    return run.gradients.accuracy(data().validation)


def test_a_run_goes_on_to_the_fixed_time_and_ends_at_the_limit_without_the_target() -> None:
    reached = cluster(scenario(target_accuracy=0.5, fixed_time_s=1.0, time_limit_s=9.0))
    missed = cluster(scenario(target_accuracy=1.0, fixed_time_s=1.0, time_limit_s=1.5))
    for run in (reached, missed):
        with pytest.raises(RuntimeError, match="when the run is over"):
            run.test_accuracy()
        while run.run_window():
            assert run.time_s < 9.0
    assert reached.time_to_target_s < 1.0 <= reached.time_s < 1.5
    assert missed.time_to_target_s is None
    assert missed.time_s >= 1.5
    assert missed.evaluations[-1].time_s <= 1.5
    assert reached.test_accuracy() == reached.gradients.accuracy(data().test) > 0.5


def test_labels_are_wrong_by_the_share_asked_for_and_the_same_ones_for_every_policy() -> None:
    clean = data(5000)
    noisy, again, other = (training_part(scenario(label_noise=0.3), clean, seed) for seed in (1, 1, 2))
    assert float((noisy.labels != clean.train.labels).float().mean()) == pytest.approx(0.3, abs=0.02)
    assert torch.equal(noisy.labels, again.labels)
    assert not torch.equal(noisy.labels, other.labels)


def test_ranks_are_spread_over_nodes_and_every_node_reports_its_own() -> None:
    run = cluster(scenario(ranks_per_node=3, **LONG))
    assert [(node.node, node.ranks) for node in run.job.nodes] == [("virtual-0", (0, 1, 2)), ("virtual-1", (3,))]
    one, two = run.run_window()
    assert [row.rank for row in one.rows] == [0, 1, 2]
    assert [row.rank for row in two.rows] == [3]
    assert [row.local_rank for row in one.rows + two.rows] == [0, 1, 2, 0]
    assert (len(one.simulated), len(two.simulated)) == (3, 1)
    assert one.totals == two.totals
    assert one.totals.num_samples == sum(row.num_samples for row in one.rows + two.rows)


SIZES = (40, 16, 24)
"""Steps of 80 samples, of 500: the end of an epoch falls into rounds of local steps."""
WINDOW_STEPS = 5
RATES = {"sgd": 0.05, "adam": 0.002}
PLANS: dict[str, list[Exchange]] = {
    "lossy": [Exchange(codec="int8"), Exchange(codec="int8", route="shares", shares=(3.0, 1.0, 1.0)), EXACT],
    "local": [Exchange(every=4, outer_rate=0.0, outer_momentum=0.9), Exchange(every=3, codec="int8"), EXACT],
}
"""Decisions of the windows 1, 3 and 5, each in effect from the next one on."""


def decided(permission: str, window: int) -> Exchange | None:
    return PLANS[permission][window // 2] if window in (1, 3, 5) else None


def ruling(permission: str, num_windows: int) -> list[str]:
    """What rules each step, as it is to be."""
    windows = [EXACT, *PLANS[permission]]
    return [windows[min(window // 2, 3)].label for window in range(num_windows) for _ in range(WINDOW_STEPS)]


def _real(_rank: int, num_steps: int, permission: str, optimizer_name: str) -> tuple[torch.Tensor, list[str]]:
    """The parameters of real ranks after some steps, and what ruled each, on the data of `virtual.data`."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(workload_named("fashion-14-mlp").model().double())
    optimizer = make_optimizer(optimizer_name, ddp.parameters(), RATES[optimizer_name])
    data = TensorDataset(*virtual.data(500, dtype=torch.float64).train)
    options: dict[str, Any] = {"base_global_batch_size": 128, "learning_rate_rule": "sqrt", "exchange": permission}
    options |= {"policy": "static", "connect": False, "seed": 3, "global_batch": "adaptive"}
    ruled: list[str] = []
    with attach(ddp, optimizer, data, local_batch_size=SIZES, window_steps=WINDOW_STEPS, **options) as session:
        while len(ruled) < num_steps:
            for inputs, labels in session.loader:
                exchange = decided(permission, session.window) if session.step_index % WINDOW_STEPS == 0 else None
                if exchange is not None:
                    offer(session, SIZES, session.window - 1, exchange=exchange)
                ruled.append(session.allocation.exchange.label)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(ddp(inputs), labels)
                loss.backward()
                optimizer.step()
                session.step(loss)
                if len(ruled) == num_steps:
                    break
    return flat_parameters(ddp), ruled


@pytest.mark.parametrize(
    ("permission", "num_windows", "optimizer"),
    [("lossy", 8, "sgd"), ("local", 8, "adam")],
)
def test_virtual_ranks_have_the_parameters_of_real_ones(permission: str, num_windows: int, optimizer: str) -> None:
    real = run_ranks(_real, len(SIZES), num_windows * WINDOW_STEPS, permission, optimizer)
    scenario = virtual.scenario(
        workers=tuple(Workers(samples_per_s=1000.0, max_local_batch_size=size) for size in SIZES),
        network=Network(num_buckets=1),
        exchange=permission,
        optimizer=optimizer,
        learning_rate=RATES[optimizer],
        window_steps=WINDOW_STEPS,
        initial_local_batch_size=64,
        fixed_time_s=1e3,
        time_limit_s=1e6,
        evaluate_every_s=1e6,
    )
    run, exact = (virtual.cluster(scenario, data=virtual.data(500, dtype=torch.float64)) for _ in range(2))
    ruled = []
    for window in range(num_windows):
        ruled += [run._schedule.allocation_at(run.position.step).exchange.label] * WINDOW_STEPS
        exchange = decided(permission, window)
        if exchange is not None:
            run.offer(virtual.action(run.job, window - 1, SIZES, exchange=exchange))
        run.run_window()
        exact.run_window()
    expected = ruling(permission, num_windows)
    assert ruled == expected
    found, plain = (cluster.gradients.parameters.detach() for cluster in (run, exact))
    for of_rank, ruled_there in real:
        assert ruled_there == expected
        assert float((of_rank - found).abs().max()) < 1e-9
    assert float((plain - found).abs().max()) > 1e-7
