"""One window of a captured job, with what each kind of message says about it. Pure."""

import statistics
from collections.abc import Iterator

import msgspec

from dynamix.schemas.messages import (
    Action,
    Applied,
    GlobalMetrics,
    MetricWindow,
    RankMetrics,
    RankReward,
    Report,
    Reward,
    State,
)

NODE_KINDS = ("report", "window", "state", "reward")
"""Every node sends one message of each of these kinds per window."""


class CapturedWindow(msgspec.Struct):
    """One window; its messages may come in any order."""

    generation: int
    window: int
    keep_details: bool = False
    started_ns: int = 0
    """When the broker stored the first report of it, 0 without one."""
    state_ns: int = 0
    """When it stored the last state."""
    nodes: dict[str, set[str]] = msgspec.field(default_factory=lambda: {kind: set() for kind in NODE_KINDS})
    """By kind, the nodes that a message came from."""
    num_doubles: int = 0
    """Messages that repeated an earlier one."""
    metrics: GlobalMetrics | None = None
    """The whole job, from any node's metric window."""
    energy_j: float | None = None
    """Joules of all ranks' devices, in jobs that measure them."""
    local_batch_sizes: dict[int, int] = {}
    """By rank, the sizes in use, from metric windows or else from reports."""
    probes: set[str] = set()
    num_steps: int = 0
    """Optimizer steps, from any node's report or metric window; 0 without one."""
    action: Action | None = None
    """What was decided on this window's states."""
    decided_ns: int = 0
    applied: list[Applied] = []
    """The decisions that ranks began to follow in this window."""
    rewards: list[float] = []
    detailed: dict[int, tuple[RankMetrics | None, RankReward | None]] = {}
    """With `keep_details`, metrics and rewards of every rank."""

    @property
    def was_run(self) -> bool:
        """Whether there is any message but an adoption."""
        return self.action is not None or any(self.nodes.values())

    @property
    def mean_reward(self) -> float | None:
        """Mean over the ranks whose reward is known."""
        return statistics.fmean(self.rewards) if self.rewards else None

    @property
    def decision_s(self) -> float | None:
        """From the last state of this window stored to the action stored; `None` where one is missing."""
        return (self.decided_ns - self.state_ns) / 1e9 if self.decided_ns and self.state_ns else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Local batch sizes in rank order, of the ranks that are known."""
        return tuple(size for _, size in sorted(self.local_batch_sizes.items()))

    def missing(self, nodes: set[str]) -> Iterator[str]:
        """The kinds of messages that are missing, with the nodes where only some have sent one."""
        for kind in NODE_KINDS:
            if lacking := nodes - self.nodes[kind]:
                yield f"{kind} of {', '.join(sorted(lacking))}" if self.nodes[kind] else kind
        if self.action is None:
            yield "action"

    def record(self, message: Report | MetricWindow | State | Reward, timestamp_ns: int) -> None:
        """Take a node's message of this window into account."""
        kind = NODE_KINDS[(Report, MetricWindow, State, Reward).index(type(message))]
        if message.node in self.nodes[kind]:
            self.num_doubles += 1
            return
        self.nodes[kind].add(message.node)
        match message:
            case Report():
                self.started_ns = self.started_ns or timestamp_ns
                self.num_steps = message.totals.num_steps
                for row in message.rows:
                    self.local_batch_sizes.setdefault(row.rank, row.local_batch_size)
            case MetricWindow():
                self.metrics, self.energy_j = message.job_metrics, message.energy_j
                self.num_steps = message.num_steps
                self.probes.add(message.probe)
                for metrics in message.ranks:
                    self.local_batch_sizes[metrics.rank] = metrics.training.local_batch_size
                    self._keep(metrics.rank, metrics, None)
            case State():
                self.state_ns = max(self.state_ns, timestamp_ns)
            case Reward():
                for reward in message.ranks:
                    self.rewards.append(reward.reward)
                    self._keep(reward.rank, None, reward)

    def record_action(self, action: Action, timestamp_ns: int) -> None:
        """Take the action that was decided on this window into account."""
        self.num_doubles += self.action is not None
        self.action, self.decided_ns = action, timestamp_ns

    def _keep(self, rank: int, metrics: RankMetrics | None, reward: RankReward | None) -> None:
        if self.keep_details:
            known = self.detailed.get(rank, (None, None))
            self.detailed[rank] = (metrics or known[0], reward or known[1])
