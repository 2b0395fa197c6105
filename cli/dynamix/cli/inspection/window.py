"""One window of a captured job, with what each kind of message says about it. Pure."""

import statistics
from collections.abc import Iterator

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


class CapturedWindow:
    """One window; its messages may come in any order.

    Attributes:
        generation: restart count of the job.
        window: index in its generation.
        started_ns: when the broker stored the first report of it, 0 without one.
        nodes: by kind, the nodes that a message came from.
        num_doubles: messages that repeated an earlier one.
        metrics: the whole job, from any node's metric window.
        local_batch_sizes: by rank, the sizes in use, from metric windows or else from reports.
        probes: what the nodes' network metrics came from.
        action: what was decided on this window's states.
        decided_ns: when the broker stored it.
        applied: the decisions that ranks began to follow in this window.
        detailed: with `keep_details`, metrics and rewards of every rank.
    """

    def __init__(self, generation: int, window: int, *, keep_details: bool = False) -> None:
        self.generation = generation
        self.window = window
        self.started_ns = 0
        self.state_ns = 0
        self.nodes: dict[str, set[str]] = {kind: set() for kind in NODE_KINDS}
        self.num_doubles = 0
        self.metrics: GlobalMetrics | None = None
        self.local_batch_sizes: dict[int, int] = {}
        self.probes: set[str] = set()
        self.action: Action | None = None
        self.decided_ns = 0
        self.applied: list[Applied] = []
        self.detailed: dict[int, tuple[RankMetrics | None, RankReward | None]] = {}
        self._keep_details = keep_details
        self._rewards: list[float] = []

    @property
    def was_run(self) -> bool:
        """Whether there is any message but an adoption."""
        return self.action is not None or any(self.nodes.values())

    @property
    def mean_reward(self) -> float | None:
        """Mean over the ranks whose reward is known."""
        return statistics.fmean(self._rewards) if self._rewards else None

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
                for row in message.rows:
                    self.local_batch_sizes.setdefault(row.rank, row.local_batch_size)
            case MetricWindow():
                self._add_metrics(message)
            case State():
                self.state_ns = max(self.state_ns, timestamp_ns)
            case Reward():
                self._add_rewards(message)

    def record_action(self, action: Action, timestamp_ns: int) -> None:
        """Take the action that was decided on this window into account."""
        self.num_doubles += self.action is not None
        self.action, self.decided_ns = action, timestamp_ns

    def _add_metrics(self, message: MetricWindow) -> None:
        self.metrics = message.job_metrics
        self.probes.add(message.probe)
        for rank in message.ranks:
            self.local_batch_sizes[rank.rank] = rank.training.local_batch_size
            if self._keep_details:
                self.detailed[rank.rank] = (rank, self.detailed.get(rank.rank, (None, None))[1])

    def _add_rewards(self, message: Reward) -> None:
        self._rewards += [rank.reward for rank in message.ranks]
        if self._keep_details:
            for rank in message.ranks:
                self.detailed[rank.rank] = (self.detailed.get(rank.rank, (None, None))[0], rank)
