"""The windows so far, as loggers and notebooks see them; used by the training thread alone.

What the ranks measured is known when a window has ended, its reward some time later. So a window is handed to the
loggers when the next one has ended, with what is known by then; the history itself still takes what comes later.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamix.schemas.messages import Reward
from dynamix.trainer.wire.transport import INBOX_REWARDS, Transport

from .delivery import Loggers

KEPT_WINDOWS = 4096
"""With 16 ranks 23 MB, and 80,000 steps of the default window."""
AWAITED_WINDOWS = 64
"""Rewards of older windows come too late."""


@dataclass(frozen=True, kw_only=True)
class EndedWindow:
    """One window, and what its reward is summed up from."""

    step: int
    metrics: dict[str, float | str]
    rewarded_nodes: set[str] = field(default_factory=set)
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Ranks that have each term: one that cannot be computed is left out."""

    def add_reward(self, reward: Reward) -> None:
        """Take a node's rewards: means over the ranks known so far, each term apart."""
        if reward.node in self.rewarded_nodes:
            return
        self.rewarded_nodes.add(reward.node)
        for rank in reward.ranks:
            for name, value in {"mean": rank.reward, **rank.terms}.items():
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1
        self.metrics.update({f"reward/{name}": total / self.counts[name] for name, total in self.sums.items()})


class MetricHistory:
    """The newest windows of this generation; hands each to the loggers once."""

    def __init__(self, loggers: Loggers, transport: Transport) -> None:
        """Rewards are taken from `transport`: where nothing comes over a bus, windows have none."""
        self._loggers = loggers
        self._transport = transport
        self._windows: deque[EndedWindow] = deque(maxlen=KEPT_WINDOWS)
        self._rewards: deque[Reward] = deque(maxlen=INBOX_REWARDS)
        """Those of a window that has not ended here: another node may be faster."""
        self._is_newest_logged = True

    def add_window(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Add the window that ended with `step` optimizer steps done; the one before goes to the loggers."""
        self._log_newest()
        self._windows.append(EndedWindow(step=step, metrics=dict(metrics)))
        self._is_newest_logged = False

    def rows(self) -> list[dict[str, float | str]]:
        """The windows, oldest first, each with its `step`."""
        self._take_rewards()
        return [{"step": window.step, **window.metrics} for window in self._windows]

    def close(self, timeout_s: float) -> None:
        """Hand the last window over and close the loggers; waits at most `timeout_s`."""
        self._log_newest()
        self._loggers.close(timeout_s)

    def _log_newest(self) -> None:
        self._take_rewards()
        if not self._is_newest_logged:
            newest = self._windows[-1]
            self._loggers.publish(newest.step, dict(newest.metrics))
            self._is_newest_logged = True

    def _take_rewards(self) -> None:
        self._rewards.extend(self._transport.take_rewards())
        if not self._rewards:
            return
        newest = list(self._windows)[-AWAITED_WINDOWS:]
        awaited = {(window.metrics["generation"], window.metrics["window"]): window for window in newest}
        early = []
        for reward in self._rewards:
            if (window := awaited.get((reward.generation, reward.window))) is not None:
                window.add_reward(reward)
            elif not awaited or (reward.generation, reward.window) > max(awaited):
                early.append(reward)
        self._rewards = deque(early, maxlen=INBOX_REWARDS)
