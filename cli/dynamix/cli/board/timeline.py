"""What a job did window by window: curves, sizes by rank, nodes, rewards, decisions. Pure, bounded, in any order."""

from collections.abc import Iterable, Iterator
from statistics import fmean

import msgspec

from dynamix.schemas.messages import Action, Applied, GlobalMetrics, MetricWindow, Reward

HISTORY_WINDOWS = 240
"""Windows kept by default: more than a wide terminal has columns for one."""

WindowOf = tuple[int, int]
"""Generation and window: what orders the windows of a job."""


class NodeTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """One node in one window; `None` where not known."""

    cpu_time_ratio: float | None
    """Busy share of its processors, 0 ... 1, all jobs together."""
    tx_bytes_per_s: float | None
    """Sent by this job's ranks on the node to other ranks, acknowledged."""
    rx_bytes_per_s: float | None


class HistoryPoint(msgspec.Struct, kw_only=True):
    """One window of a job; its nodes' messages come one after the other."""

    generation: int
    window: int
    metrics: GlobalMetrics | None = None
    """The whole job; `None` while only rewards of it are known."""
    time_ns: int = 0
    """When the broker stored its first metric window, 0 where that is not known."""
    revision: int = 0
    """The timeline's when this point last changed."""
    local_batch_sizes: dict[int, int] = {}
    """By rank."""
    nodes: dict[str, NodeTraffic] = {}
    rewards: dict[str, tuple[int, float, dict[str, float]]] = {}
    """By node: number of ranks, their mean reward, and their mean terms."""

    def mean_reward(self) -> float | None:
        """Mean over all ranks whose reward is known."""
        return _weighted((count, mean) for count, mean, _ in self.rewards.values())

    def reward_terms(self) -> dict[str, float]:
        """Each term, mean over the ranks, in the order of the formula."""
        names = dict.fromkeys(name for _, _, terms in self.rewards.values() for name in terms)
        found = {
            name: _weighted((count, terms.get(name, 0.0)) for count, _, terms in self.rewards.values())
            for name in names
        }
        return {name: value for name, value in found.items() if value is not None}


class DecidedWindow(msgspec.Struct, kw_only=True):
    """One decision, and its adoption; either may be known first."""

    generation: int
    window: int
    action: Action | None = None
    """Without the policy's memory."""
    time_ns: int = 0
    """When the broker stored the action."""
    applied: Applied | None = None
    revision: int = 0


class Timeline:
    """The newest windows and decisions of one job; a message that comes twice changes nothing."""

    def __init__(self, most_windows: int = HISTORY_WINDOWS) -> None:
        self._most_windows = most_windows
        self._points: dict[WindowOf, HistoryPoint] = {}
        self._decided: dict[WindowOf, DecidedWindow] = {}
        self.revision = 0
        """Counts the changes: what is newer than a reader's last look has a greater one."""

    @property
    def points(self) -> list[HistoryPoint]:
        """The windows, oldest first."""
        return [self._points[key] for key in sorted(self._points)]

    @property
    def decisions(self) -> list[DecidedWindow]:
        """The decisions whose action is known, oldest first."""
        return [entry for _, entry in sorted(self._decided.items()) if entry.action is not None]

    @property
    def newest(self) -> HistoryPoint | None:
        """The newest window whose metrics are known."""
        known = (key for key, point in self._points.items() if point.metrics is not None)
        return self._points[newest] if (newest := max(known, default=None)) is not None else None

    def values(self, field: str) -> Iterator[float]:
        """One field of the whole job over the windows, unknown values left out."""
        for point in self.points:
            value = None if point.metrics is None else getattr(point.metrics, field)
            if value is not None:
                yield float(value)

    def add_window(self, window: MetricWindow, timestamp_ns: int) -> None:
        """Take one node's metric window into account."""
        point = self._point(window.generation, window.window)
        point.metrics = window.job_metrics
        point.time_ns = min(point.time_ns or timestamp_ns, timestamp_ns)
        point.nodes[window.node] = _node_traffic(window)
        point.local_batch_sizes |= {rank.rank: rank.training.local_batch_size for rank in window.ranks}

    def add_reward(self, reward: Reward) -> None:
        """Take the rewards of one node's ranks into account."""
        names = dict.fromkeys(name for rank in reward.ranks for name in rank.terms)
        terms = {name: fmean(rank.terms.get(name, 0.0) for rank in reward.ranks) for name in names}
        mean = fmean(rank.reward for rank in reward.ranks)
        self._point(reward.generation, reward.window).rewards[reward.node] = (len(reward.ranks), mean, terms)

    def add_action(self, action: Action, timestamp_ns: int) -> None:
        """Take a decision into account."""
        entry = self._decision(action.generation, action.window)
        entry.action, entry.time_ns = msgspec.structs.replace(action, carry=b""), timestamp_ns

    def add_applied(self, applied: Applied) -> None:
        """Take the adoption of a decision into account."""
        self._decision(applied.generation, applied.decided_window).applied = applied

    def _point(self, generation: int, window: int) -> HistoryPoint:
        self.revision += 1
        point = self._points.get((generation, window))
        if point is None:
            point = self._points[generation, window] = HistoryPoint(generation=generation, window=window)
            _drop_oldest(self._points, self._most_windows)
        point.revision = self.revision
        return point

    def _decision(self, generation: int, window: int) -> DecidedWindow:
        self.revision += 1
        entry = self._decided.get((generation, window))
        if entry is None:
            entry = self._decided[generation, window] = DecidedWindow(generation=generation, window=window)
            _drop_oldest(self._decided, self._most_windows)
        entry.revision = self.revision
        return entry


def _drop_oldest(entries: dict[WindowOf, HistoryPoint] | dict[WindowOf, DecidedWindow], most: int) -> None:
    while len(entries) > most:
        del entries[min(entries)]


def _weighted(values: Iterable[tuple[int, float]]) -> float | None:
    """Mean of values that stand for so many ranks each."""
    known = list(values)
    total = sum(count for count, _ in known)
    return sum(count * value for count, value in known) / total if total else None


def _node_traffic(window: MetricWindow) -> NodeTraffic:
    duration_s = window.num_steps * window.job_metrics.step_time_s
    counted = [rank.network for rank in window.ranks if rank.network is not None]
    is_known = bool(counted) and duration_s > 0
    return NodeTraffic(
        cpu_time_ratio=window.node_metrics.cpu_time_ratio,
        tx_bytes_per_s=sum(network.tx_bytes for network in counted) / duration_s if is_known else None,
        rx_bytes_per_s=sum(network.rx_bytes for network in counted) / duration_s if is_known else None,
    )
