"""Virtual jobs that no centre steers: two nodes, of ranks with 3200 and with 1000 samples per second at 32 each."""

import pytest
from tests.support import virtual

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.episode import Episode, run_episode
from dynamix.lab.simulator.scenario import Scenario
from dynamix.schemas.messages import Action, Report, Trace

SLOW_NODE = "virtual-1"
LONG = {"target_accuracy": 1.0, "time_limit_s": 2.5}
"""A target that is never reached: some twenty windows."""
KEEP = {"dead_band": 1.0}
"""An appetite is at most twice the global batch: with this it stays."""


class _WithoutArbitrator(VirtualCluster):
    def offer(self, action: Action) -> None:
        """No action arrives."""


class _OneAgentDies(VirtualCluster):
    def leave_trace(self, trace: Trace) -> None:
        """That of the slow node leaves one trace and dies."""
        if trace.node != SLOW_NODE or trace.window == 0:
            super().leave_trace(trace)


def run(
    options: dict[str, float] | None = None,
    *,
    cluster: type[VirtualCluster] = VirtualCluster,
    scenario: Scenario | None = None,
) -> tuple[Episode, list[tuple[int, ...]]]:
    """A job, and the sizes of its windows."""
    sizes: list[tuple[int, ...]] = []

    def record(reports: list[Report]) -> None:
        sizes.append(tuple(row.local_batch_size for report in reports for row in report.rows))

    episode = run_episode(
        scenario or virtual.scenario(ranks_per_node=2, **LONG),
        policy_named("stigmergy"),
        data=virtual.data(),
        seed=3,
        policy_options=options or {},
        on_window=record,
        make_cluster=cluster,
    )
    return episode, sizes


def test_the_traces_of_window_0_divide_window_2_by_speed() -> None:
    _, sizes = run(KEEP)
    assert sizes[:3] == [(32, 32, 32, 32), (32, 32, 32, 32), (49, 49, 15, 15)]
    assert all(sum(each) == 128 for each in sizes)


def test_the_global_batch_is_the_mean_appetite_of_the_agents() -> None:
    _, sizes = run()
    assert {sum(each) for each in sizes[:2]} == {128}
    assert sum(sizes[2]) != 128
    slowest = [max(each[0] / 4000 + 0.002, each[3] / 1000) for each in sizes]
    fastest = [min(each[0] / 4000 + 0.002, each[3] / 1000) for each in sizes]
    assert slowest[0] / fastest[0] == pytest.approx(3.2)
    assert slowest[-1] / fastest[-1] < 1.1


def test_without_an_arbitrator_the_same_happens() -> None:
    (steered, sizes), (alone, without) = run(), run(cluster=_WithoutArbitrator)
    assert sizes == without
    assert steered.evaluations == alone.evaluations
    assert (len(steered.applied) > 0, len(alone.applied)) == (True, 0)


def test_an_agent_that_dies_leaves_its_ranks_with_their_share() -> None:
    _, sizes = run(KEEP, cluster=_OneAgentDies)
    assert len(sizes) > 12  # its trace has gone by then
    assert set(sizes[2:]) == {(49, 49, 15, 15)}
