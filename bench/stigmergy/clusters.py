"""Virtual clusters of any number of workers in which services die, and what steering them sends per window."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from dynamix.arbitrator.policies.policy import Policy
from dynamix.collector.agent import trace_of
from dynamix.lab.experiments.episodes.episode import ControlPlane
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.scenario import Scenario, Stragglers
from dynamix.lab.workloads import Data
from dynamix.schemas.codec import encode
from dynamix.schemas.messages import Action, Message, Report, Trace

DEATH_WINDOW = 10
"""From this window on what has died sends nothing."""

STRAGGLERS = Stragglers(factor=2.5, mean_normal_s=30.0, mean_slow_s=6.0, jitter=0.05)


class WithoutArbitrator(VirtualCluster):
    """No action of a window from `DEATH_WINDOW` on arrives."""

    def offer(self, action: Action) -> None:
        """Hand over an action of earlier windows."""
        if action.window < DEATH_WINDOW:
            super().offer(action)


class WithHalfOfTheAgents(VirtualCluster):
    """No trace of every second node arrives, from `DEATH_WINDOW` on."""

    def leave_trace(self, trace: Trace) -> None:
        """Hand over a trace of earlier windows, and of the other nodes."""
        nodes = [node.node for node in self.job.nodes]
        if trace.window < DEATH_WINDOW or nodes.index(trace.node) % 2 == 0:
            super().leave_trace(trace)


class SteeringTraffic(NamedTuple):
    """What is published per window to steer one job, besides the reports."""

    num_messages: float
    num_bytes: float


def scaled(scenario: Scenario, num_workers: int, ranks_per_node: int, *, has_stragglers: bool) -> Scenario:
    """The scenario with so many workers in the same proportions, with or without workers that slow down now and then.

    More workers than it has may take longer in proportion: a ring of them takes as much longer for each step.

    Raises:
        ValueError: when its workers cannot be divided like that.
    """
    present = sum(workers.count for workers in scenario.workers)
    if any(workers.count * num_workers % present for workers in scenario.workers):
        raise ValueError(f"{num_workers} workers cannot be divided as the {present} of scenario {scenario.name} are")
    workers = tuple(
        msgspec.structs.replace(each, count=each.count * num_workers // present) for each in scenario.workers
    )
    limit_s = scenario.time_limit_s * max(1.0, num_workers / present)
    scenario = msgspec.structs.replace(scenario, workers=workers, ranks_per_node=ranks_per_node, time_limit_s=limit_s)
    return msgspec.structs.replace(scenario, stragglers=STRAGGLERS) if has_stragglers else scenario


def traffic(
    scenario: Scenario,
    policy: Policy,
    data: Data,
    num_windows: int = 5,
    *,
    options: Mapping[str, float] | None = None,
) -> SteeringTraffic:
    """Messages and bytes per window: states and actions, or traces and what reports carry for agents."""
    cluster = VirtualCluster(scenario, data, seed=0, policy=policy.name, policy_options=options)
    control = ControlPlane(cluster.job, policy)
    num_messages, num_bytes = 0, 0
    for _ in range(num_windows):
        reports = cluster.run_window()
        made, actions = control.of_window(reports)
        for action in actions:
            cluster.offer(action)
        traces = [trace for report in reports if (trace := trace_of(report)) is not None]
        for trace in traces:
            cluster.leave_trace(trace)
        sent: Sequence[Message] = traces or [*made.states, *actions]
        num_messages += len(sent)
        num_bytes += sum(len(encode(message)) for message in sent) + sum(map(_view_bytes, reports))
    return SteeringTraffic(num_messages / num_windows, num_bytes / num_windows)


def _view_bytes(report: Report) -> int:
    return len(encode(report)) - len(encode(msgspec.structs.replace(report, field=None)))
