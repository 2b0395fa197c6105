"""The board: what is known of one job, folded from its messages, and as JSON. Pure: no bus, no clock, no terminal."""

from collections import deque
from collections.abc import Iterable
from statistics import fmean

import msgspec

from dynamix.cli.output import Document, document_of
from dynamix.schemas.messages import (
    Action,
    Applied,
    Event,
    GlobalMetrics,
    Job,
    Message,
    MetricWindow,
    RankMetrics,
    RankReward,
    Reward,
)
from dynamix.schemas.messages.allocation import EXACT, Exchange

from .heartbeats import Heartbeats

HISTORY_WINDOWS = 240
"""Windows kept for the curves: more than a wide terminal has columns for one."""


class HistoryPoint(msgspec.Struct, frozen=True):
    """The whole job in one window, for the curves."""

    generation: int
    window: int
    metrics: GlobalMetrics


class BoardRank(msgspec.Struct, frozen=True, kw_only=True):
    """The newest metrics and reward of one rank."""

    rank: int
    node: str
    window: int
    metrics: RankMetrics
    reward: RankReward | None = None


class Board(msgspec.Struct):
    """What is known of one job; messages may come in any order and more than once."""

    name: str
    job: Job | None = None
    """Its specification, `None` until it is seen."""
    generation: int = 0
    """The newest generation seen; older messages no longer count."""
    window: int = -1
    """The newest window with a message, -1 before the first."""
    ranks: dict[int, BoardRank] = {}
    nodes: dict[str, MetricWindow] = {}
    """By name, the newest metric window."""
    history: deque[HistoryPoint] = msgspec.field(default_factory=lambda: deque(maxlen=HISTORY_WINDOWS))
    """One point per window, oldest first."""
    action: Action | None = None
    applied: Applied | None = None
    """The newest decision that all ranks adopted."""
    event: Event | None = None
    """The newest failure signature seen."""
    formula: str = ""
    """The formula of the rewards."""
    updated_ns: int = 0
    """When the broker stored the newest window."""
    rewards: dict[int, tuple[int, RankReward]] = {}
    """By rank, the newest reward and its window."""

    def fold(self, message: Message, timestamp_ns: int = 0) -> None:
        """Take one message of this job into account; messages of other kinds and jobs change nothing."""
        if getattr(message, "job", None) != self.name:
            return
        generation = getattr(message, "generation", 0)
        if generation < self.generation:
            return
        if generation > self.generation:
            self._begin_generation(generation)
        match message:
            case Job():
                self.job = message
            case MetricWindow():
                self._add_window(message, timestamp_ns)
            case Reward():
                self._add_reward(message)
            case Action() if self.action is None or message.window >= self.action.window:
                self.action = message
            case Applied() if self.applied is None or message.effective_window >= self.applied.effective_window:
                self.applied = message
            case Event() if self.event is None or message.window >= self.event.window:
                self.event = message

    @property
    def metrics(self) -> GlobalMetrics | None:
        """The whole job in the newest window."""
        return self.history[-1].metrics if self.history else None

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """The sizes in use, by rank; before the first window those that the job began with."""
        if self.ranks:
            return tuple(row.metrics.training.local_batch_size for _, row in sorted(self.ranks.items()))
        return self.job.initial_local_batch_sizes if self.job else ()

    @property
    def exchange(self) -> Exchange:
        """How gradients travel: as the newest adopted decision says, before it as they began."""
        if self.applied is not None:
            return self.applied.exchange
        return self.job.initial_exchange if self.job else EXACT

    def reward_terms(self) -> dict[str, float]:
        """Each term of the newest rewards, mean over ranks, in the order of the formula."""
        rewards = [row.reward for row in self.ranks.values() if row.reward is not None]
        names = dict.fromkeys(name for reward in rewards for name in reward.terms)
        return {name: fmean(reward.terms.get(name, 0.0) for reward in rewards) for name in names}

    def mean_reward(self) -> float | None:
        """Mean over the ranks whose reward is known."""
        rewards = [row.reward.reward for row in self.ranks.values() if row.reward is not None]
        return fmean(rewards) if rewards else None

    def curve(self, field: str) -> list[float]:
        """One field of the whole job over the windows, unknown values left out."""
        values: Iterable[float | None] = (getattr(point.metrics, field) for point in self.history)
        return [float(value) for value in values if value is not None]

    def _begin_generation(self, generation: int) -> None:
        """After a restart windows count from 0 again; the curves go on."""
        self.generation = generation
        self.window = -1
        self.ranks.clear()
        self.nodes.clear()
        self.rewards.clear()
        self.action = self.applied = self.event = None

    def _add_window(self, window: MetricWindow, timestamp_ns: int) -> None:
        if window.window > self.window:
            self.window = window.window
            self.updated_ns = timestamp_ns
            self.history.append(HistoryPoint(window.generation, window.window, window.job_metrics))
        known = self.nodes.get(window.node)
        if known is not None and known.window > window.window:
            return
        self.nodes[window.node] = window
        for rank in window.ranks:
            _, reward = self.rewards.get(rank.rank, (0, None))
            self.ranks[rank.rank] = BoardRank(
                rank=rank.rank, node=window.node, window=window.window, metrics=rank, reward=reward
            )

    def _add_reward(self, reward: Reward) -> None:
        self.formula = reward.formula
        for rank in reward.ranks:
            newest, _ = self.rewards.get(rank.rank, (-1, None))
            if reward.window < newest:
                continue
            self.rewards[rank.rank] = (reward.window, rank)
            if (row := self.ranks.get(rank.rank)) is not None:
                self.ranks[rank.rank] = msgspec.structs.replace(row, reward=rank)


def snapshot(board: Board | None, heartbeats: Heartbeats, now_s: float) -> Document:
    """Everything that the view shows, with the units in the names; `job` is `None` while there is none."""
    return {
        "job": None if board is None else _job(board),
        "services": [
            {**msgspec.structs.asdict(beat.live), "heard_s_ago": now_s - beat.heard_s, "late": beat.is_late(now_s)}
            for beat in heartbeats.recent(now_s)
        ],
        "services_missing": heartbeats.missing(now_s),
    }


def _job(board: Board) -> Document:
    return {
        "name": board.name,
        "specification": document_of(board.job),
        "generation": board.generation,
        "window": None if board.window < 0 else board.window,
        "updated_ns": board.updated_ns or None,
        "local_batch_sizes": list(board.local_batch_sizes),
        "exchange": {**document_of(board.exchange), "label": board.exchange.label},
        "metrics": document_of(board.metrics),
        "ranks": [_rank(row) for _, row in sorted(board.ranks.items())],
        "action": document_of(board.action, leave_out=("carry",)),
        "applied": document_of(board.applied),
        "event": document_of(board.event),
        "reward": {"formula": board.formula, "mean": board.mean_reward(), "terms": board.reward_terms()},
        "history": [
            {"generation": point.generation, "window": point.window, **document_of(point.metrics)}
            for point in board.history
        ],
    }


def _rank(row: BoardRank) -> Document:
    return {
        "rank": row.rank,
        "node": row.node,
        "window": row.window,
        "training": document_of(row.metrics.training),
        "system": document_of(row.metrics.system),
        "network": document_of(row.metrics.network),
        "reward": None if row.reward is None else row.reward.reward,
    }
