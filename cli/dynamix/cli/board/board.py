"""The board: what is known of one job, folded from its messages, and as JSON. Pure: no bus, no clock, no terminal."""

from collections import deque
from statistics import fmean
from typing import Literal

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
from .timeline import Timeline

SILENT_AFTER_S = 60.0
"""A job that runs and sends nothing for so long was killed, as far as anyone can tell; its end was never published."""
SILENT_BEFORE_FIRST_WINDOW_S = 600.0
"""The same before its first window: loading data or compiling a model takes a while."""
SILENT_GAPS = 3
"""How many of its longest pauses between two windows are waited for, where that is longer."""
LATE_AFTER_WINDOWS = 3
"""By then a decision was made of the first windows, if any will be: a refused job gets none."""
KEPT_EVENTS = 32

Phase = Literal["running", "silent", "ended"]
"""`silent`: it did not say that it ended, and sends nothing any more."""


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
    timeline: Timeline = msgspec.field(default_factory=Timeline)
    """What it did window by window."""
    action: Action | None = None
    applied: Applied | None = None
    """The newest decision that all ranks adopted."""
    event: Event | None = None
    """The newest failure signature seen."""
    events: deque[tuple[int, Event]] = msgspec.field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    """This generation's failure signatures, each with the time when the broker stored it, as they came."""
    formula: str = ""
    """The formula of the rewards."""
    updated_ns: int = 0
    """When the broker stored the newest window."""
    heard_ns: int = 0
    """When it stored the newest message of this job, 0 where that is not known."""
    longest_gap_ns: int = 0
    """The longest pause between two windows of this generation."""
    revision: int = 0
    """Counts the messages that were folded in."""
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
        self.revision += 1
        self.heard_ns = max(self.heard_ns, timestamp_ns)
        self._remember(message, timestamp_ns)
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
        newest = self.timeline.newest
        return None if newest is None else newest.metrics

    def phase(self, now_ns: int) -> Phase:
        """Whether it runs, has ended, or died without a word, by the time `now_ns` of the wall clock."""
        if self.job is not None and self.job.phase == "ended":
            return "ended"
        return "silent" if self.heard_ns and now_ns - self.heard_ns > self._patience_ns else "running"

    @property
    def reason(self) -> str:
        """Why the arbitrator decided so, in its own words, of the newest decision; empty where it says nothing."""
        return "" if self.action is None else self.action.reason

    @property
    def unmeasured_nodes(self) -> list[str]:
        """Nodes of the job that no window came from yet."""
        return [] if self.job is None else [node.node for node in self.job.nodes if node.node not in self.nodes]

    @property
    def lacks_decision(self) -> bool:
        """Whether no decision was made although there should be one by now."""
        return self.action is None and self.window >= LATE_AFTER_WINDOWS

    @property
    def _patience_ns(self) -> int:
        least_s = SILENT_AFTER_S if self.window >= 0 else SILENT_BEFORE_FIRST_WINDOW_S
        return max(int(least_s * 1e9), SILENT_GAPS * self.longest_gap_ns)

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
        return list(self.timeline.values(field))

    def _begin_generation(self, generation: int) -> None:
        """After a restart windows count from 0 again; the curves go on."""
        self.generation = generation
        self.window = -1
        self.ranks.clear()
        self.nodes.clear()
        self.rewards.clear()
        self.events.clear()
        self.longest_gap_ns = 0
        self.action = self.applied = self.event = None

    def _remember(self, message: Message, timestamp_ns: int) -> None:
        match message:
            case MetricWindow():
                self.timeline.add_window(message, timestamp_ns)
            case Reward():
                self.timeline.add_reward(message)
            case Action():
                self.timeline.add_action(message, timestamp_ns)
            case Applied():
                self.timeline.add_applied(message)
            case Event() if message not in (event for _, event in self.events):
                self.events.append((timestamp_ns, message))

    def _add_window(self, window: MetricWindow, timestamp_ns: int) -> None:
        if window.window > self.window:
            if self.window >= 0 and self.updated_ns:
                self.longest_gap_ns = max(self.longest_gap_ns, timestamp_ns - self.updated_ns)
            self.window = window.window
            self.updated_ns = timestamp_ns
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
        "num_not_stored": heartbeats.num_not_stored(now_s),
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
            for point in board.timeline.points
            if point.metrics is not None
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
