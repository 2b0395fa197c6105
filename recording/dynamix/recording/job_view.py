"""A job as its messages describe it, now and window by window: for `dynamix top`, the page, `inspect`, tables.

In: the messages of one job, in any order, each with the time when the broker stored it. Out: a `JobView` with the
newest window, ranks, nodes, decision and rewards, and a `Window` for each window. Pure: no bus, no clock, no terminal.
Change here what is known of a job.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from dynamix.schemas.messages import (
    Action,
    Applied,
    Event,
    GlobalMetrics,
    Job,
    Message,
    MetricWindow,
    NodeMetrics,
    RankMetrics,
    RankReward,
    Report,
    Reward,
    State,
)
from dynamix.schemas.messages.allocation import EXACT, Exchange

from .capture import WindowKey

HISTORY_WINDOWS = 240
"""Windows kept by default: more than a wide terminal has columns for one."""
SILENT_AFTER_S = 60.0
"""A job that runs and sends nothing for so long was probably killed; its end was never published."""
SILENT_BEFORE_FIRST_WINDOW_S = 600.0
"""The same before its first window: loading data or compiling a model takes a while."""
SILENT_GAPS = 3
"""A job with long windows has so many of its longest pauses between two."""
KEPT_EVENTS = 32

Phase = Literal["running", "silent", "ended"]
"""`silent`: it published no end, and sends nothing any more."""


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest metrics and reward of one rank."""

    rank: int
    node: str
    window: int
    metrics: RankMetrics
    reward: RankReward | None = None

    @property
    def busy_time_s(self) -> float:
        """The time that tells slow ranks apart: the compute time of a step, or the whole step where it is unknown."""
        training = self.metrics.training
        return training.step_time_s if training.compute_time_s is None else training.compute_time_s


NODE_KINDS = {Report: "report", MetricWindow: "window", State: "state", Reward: "reward"}
"""Every node sends one message of each of these kinds per window."""


class NodeWindow(msgspec.Struct, kw_only=True):
    """One node in one window."""

    stored_ns: dict[str, int] = {}
    """Time at which the broker stored each kind of message."""
    metrics: NodeMetrics | None = None
    probe: str = ""
    tx_bytes_per_s: float | None = None
    """Sent by this job's ranks on the node to other ranks, acknowledged; `None` when unknown."""
    rx_bytes_per_s: float | None = None
    ranks: tuple[RankMetrics, ...] = ()
    """Empty unless the view keeps ranks."""
    rewards: tuple[RankReward, ...] = ()


class Window(msgspec.Struct):
    """One window of a job; its messages may come in any order, and one that comes twice changes nothing."""

    generation: int
    window: int
    metrics: GlobalMetrics | None = None
    """The whole job, from any node's metric window."""
    num_steps: int = 0
    """Optimizer steps, 0 when unknown."""
    nodes: dict[str, NodeWindow] = {}
    local_batch_sizes: dict[int, int] = {}
    """Local batch sizes by rank, from metric windows or else from reports."""
    formula: str = ""
    """The formula of the rewards."""
    num_rewards: int = 0
    """Ranks whose reward is known."""
    reward_sum: float = 0.0
    """Over these ranks."""
    term_sums: dict[str, float] = {}
    """The same of each term, in the order of the formula."""
    action: Action | None = None
    """The decision on this window's states, without the policy's memory unless ranks are kept."""
    decided_ns: int = 0
    applied: Applied | None = None
    """The receipt of that decision."""
    applied_ns: int = 0
    num_doubles: int = 0
    """Messages that repeated an earlier one."""
    revision: int = 0
    """The view's when this window last changed."""

    @property
    def started_ns(self) -> int:
        """When the broker stored the first report, 0 when unknown."""
        return min(self._times("report"), default=0)

    @property
    def measured_ns(self) -> int:
        """When the broker stored the first metric window, 0 when unknown."""
        return min(self._times("window"), default=0)

    @property
    def decision_s(self) -> float | None:
        """Seconds from the last state stored to the action stored; `None` where one is missing."""
        state_ns = max(self._times("state"), default=0)
        return (self.decided_ns - state_ns) / 1e9 if self.decided_ns and state_ns else None

    def _times(self, kind: str) -> list[int]:
        """When the broker stored the messages of a kind, where that is known."""
        return [at for node in self.nodes.values() if (at := node.stored_ns.get(kind))]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Local batch sizes in rank order, of the ranks that are known."""
        return tuple(size for _, size in sorted(self.local_batch_sizes.items()))

    def mean_reward(self) -> float | None:
        """Mean over all ranks whose reward is known."""
        return self.reward_sum / self.num_rewards if self.num_rewards else None

    def reward_terms(self) -> dict[str, float]:
        """Each term, mean over the ranks, in the order of the formula."""
        return {name: total / self.num_rewards for name, total in self.term_sums.items()}

    def missing(self, nodes: Iterable[str]) -> Iterator[str]:
        """The kinds of messages that are missing, with the nodes where only some have sent one."""
        for kind in NODE_KINDS.values():
            have = {name for name, node in self.nodes.items() if kind in node.stored_ns}
            if lacking := set(nodes) - have:
                yield f"{kind} of {', '.join(sorted(lacking))}" if have else kind
        if self.action is None:
            yield "action"


class JobView(msgspec.Struct):
    """Folds the messages of one job into windows, ranks and nodes."""

    name: str
    most_windows: int = HISTORY_WINDOWS
    keep_ranks: bool = False
    """Keep metrics and rewards of every rank for every window."""
    jobs: dict[int, Job] = {}
    """The newest specification of each generation."""
    windows: dict[WindowKey, Window] = {}
    adopted_in: dict[WindowKey, set[WindowKey]] = {}
    """The windows that decisions were made on, by the window in which they took effect."""
    generation: int = 0
    """The newest generation seen."""
    window: int = -1
    """The newest window with metrics, -1 before the first."""
    nodes: dict[str, MetricWindow] = {}
    """The newest metric window of each node."""
    events: deque[tuple[int, Event]] = msgspec.field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    """This generation's failure signatures, each with the time when the broker stored it, as they came."""
    rewards: dict[int, tuple[int, RankReward]] = {}
    """The newest reward of each rank, and its window."""
    updated_ns: int = 0
    """When the broker stored the newest window."""
    heard_ns: int = 0
    """When it stored the newest message of this job, 0 when unknown."""
    longest_gap_ns: int = 0
    """The longest pause between two windows of this generation."""
    revision: int = 0
    """Counts the messages that were folded in."""

    def fold(self, message: Message, timestamp_ns: int = 0) -> None:
        """Take one message of this job into account; messages of other kinds and jobs change nothing."""
        if getattr(message, "job", None) != self.name:
            return
        generation = getattr(message, "generation", 0)
        if generation > self.generation:  # after a restart windows count from 0 again; the history goes on
            self.generation, self.window, self.longest_gap_ns = generation, -1, 0
            self.nodes, self.rewards = {}, {}
            self.events.clear()
        is_current = generation == self.generation
        self.revision += 1
        if is_current:
            self.heard_ns = max(self.heard_ns, timestamp_ns)
        match message:
            case Job():
                self.jobs[generation] = message
            case Report() | MetricWindow() | State() | Reward():
                self._fold_node(message, timestamp_ns, is_current=is_current)
            case Action():
                window = self._window(message.generation, message.window)
                window.num_doubles += window.action is not None
                kept = message if self.keep_ranks else msgspec.structs.replace(message, carry=b"")
                window.action, window.decided_ns = kept, timestamp_ns
            case Applied():
                window = self._window(message.generation, message.decided_window)
                window.applied, window.applied_ns = message, timestamp_ns
                effective = WindowKey(message.generation, message.effective_window)
                decided = WindowKey(message.generation, message.decided_window)
                self.adopted_in.setdefault(effective, set()).add(decided)
            case Event() if is_current and message not in (event for _, event in self.events):
                self.events.append((timestamp_ns, message))

    def _window(self, generation: int, window: int) -> Window:
        key = WindowKey(generation, window)
        if (found := self.windows.get(key)) is None:
            found = self.windows[key] = Window(generation, window)
            while len(self.windows) > self.most_windows:
                oldest = min(self.windows)
                del self.windows[oldest]
                self.adopted_in.pop(oldest, None)
        found.revision = self.revision
        return found

    def _fold_node(
        self, message: Report | MetricWindow | State | Reward, timestamp_ns: int, *, is_current: bool
    ) -> None:
        window = self._window(message.generation, message.window)
        node = window.nodes.setdefault(message.node, NodeWindow())
        if (kind := NODE_KINDS[type(message)]) in node.stored_ns:
            window.num_doubles += 1
            return
        node.stored_ns[kind] = timestamp_ns
        match message:
            case Report():
                window.num_steps = message.totals.num_steps
                for row in message.rows:
                    window.local_batch_sizes.setdefault(row.rank, row.local_batch_size)
            case MetricWindow():
                self._fold_metrics(window, node, message)
                if is_current and message.window > self.window:
                    if self.window >= 0 and self.updated_ns:
                        self.longest_gap_ns = max(self.longest_gap_ns, timestamp_ns - self.updated_ns)
                    self.window, self.updated_ns = message.window, timestamp_ns
                known = self.nodes.get(message.node)
                if is_current and (known is None or known.window <= message.window):
                    self.nodes[message.node] = message
            case Reward():
                self._fold_reward(window, node, message, is_current=is_current)

    def _fold_metrics(self, window: Window, node: NodeWindow, message: MetricWindow) -> None:
        window.metrics, window.num_steps = message.job_metrics, message.num_steps
        window.local_batch_sizes |= {rank.rank: rank.training.local_batch_size for rank in message.ranks}
        node.metrics, node.probe = message.node_metrics, message.probe
        duration_s = message.num_steps * message.job_metrics.step_time_s
        counted = [rank.network for rank in message.ranks if rank.network is not None]
        if counted and duration_s > 0:
            node.tx_bytes_per_s = sum(network.tx_bytes for network in counted) / duration_s
            node.rx_bytes_per_s = sum(network.rx_bytes for network in counted) / duration_s
        if self.keep_ranks:
            node.ranks = tuple(message.ranks)

    def _fold_reward(self, window: Window, node: NodeWindow, message: Reward, *, is_current: bool) -> None:
        window.formula = message.formula
        window.num_rewards += len(message.ranks)
        if self.keep_ranks:
            node.rewards = tuple(message.ranks)
        for rank in message.ranks:
            window.reward_sum += rank.reward
            for name, value in rank.terms.items():
                window.term_sums[name] = window.term_sums.get(name, 0.0) + value
            if is_current and message.window >= self.rewards.get(rank.rank, (-1, None))[0]:
                self.rewards[rank.rank] = (message.window, rank)

    @property
    def job(self) -> Job | None:
        """Its newest specification, `None` until it is seen."""
        return self.jobs[max(self.jobs)] if self.jobs else None

    @property
    def action(self) -> Action | None:
        """The newest decision of this generation."""
        return next((window.action for window in self._newest() if window.action is not None), None)

    @property
    def applied(self) -> Applied | None:
        """The newest decision of this generation that all ranks adopted."""
        receipts = [window.applied for window in self._newest() if window.applied is not None]
        return max(receipts, key=lambda receipt: receipt.effective_window, default=None)

    @property
    def rewarded(self) -> Window:
        """The newest window of this generation with rewards; one without any before the first."""
        return next((window for window in self._newest() if window.num_rewards), Window(self.generation, -1))

    def _newest(self) -> Iterator[Window]:
        """The windows of this generation, newest first."""
        return (window for key, window in sorted(self.windows.items(), reverse=True) if key[0] == self.generation)

    @property
    def ranks(self) -> dict[int, RankView]:
        """The newest metrics and reward of each rank of this generation, in rank order."""
        found = {
            rank.rank: RankView(
                rank=rank.rank,
                node=measured.node,
                window=measured.window,
                metrics=rank,
                reward=self.rewards.get(rank.rank, (0, None))[1],
            )
            for measured in self.nodes.values()
            for rank in measured.ranks
        }
        return dict(sorted(found.items()))

    @property
    def history(self) -> list[Window]:
        """The windows of which there is any message but a receipt, oldest first."""
        return [window for _, window in sorted(self.windows.items()) if window.action is not None or window.nodes]

    def adopted(self, window: Window) -> list[Window]:
        """The windows whose decisions came into effect in this one."""
        keys = self.adopted_in.get(WindowKey(window.generation, window.window), ())
        return [self.windows[key] for key in sorted(keys) if key in self.windows]

    @property
    def metrics(self) -> GlobalMetrics | None:
        """Metrics of the job in the newest window that has some."""
        known = (key for key, window in self.windows.items() if window.metrics is not None)
        return self.windows[newest].metrics if (newest := max(known, default=None)) is not None else None

    def curve(self, field: str) -> list[float]:
        """The values of one field of the job over the windows, without unknown values."""
        values = (getattr(window.metrics, field, None) for window in self.history)
        return [float(value) for value in values if value is not None]

    def phase(self, now_ns: int) -> Phase:
        """Whether it runs, has ended, or died without a word, by the time `now_ns` of the wall clock."""
        if self.job is not None and self.job.phase == "ended":
            return "ended"
        least_s = SILENT_AFTER_S if self.window >= 0 else SILENT_BEFORE_FIRST_WINDOW_S
        patience_ns = max(int(least_s * 1e9), SILENT_GAPS * self.longest_gap_ns)
        return "silent" if self.heard_ns and now_ns - self.heard_ns > patience_ns else "running"

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """The sizes in use, by rank; before the first window the initial ones."""
        if self.ranks:
            return tuple(row.metrics.training.local_batch_size for _, row in sorted(self.ranks.items()))
        return self.job.initial_local_batch_sizes if self.job else ()

    @property
    def exchange(self) -> Exchange:
        """The gradient exchange of the newest adopted decision, or the initial one."""
        if self.applied is not None:
            return self.applied.exchange
        return self.job.initial_exchange if self.job else EXACT
