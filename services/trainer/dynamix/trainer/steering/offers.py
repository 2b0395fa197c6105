"""Which action, if any, the job adopts at its next boundary, and the reason in words. Pure, in global rank 0 only.

An action that does not fit this job, this generation and its bounds, that names an exchange which the trainer cannot
carry out, is too old, not newer than the adopted one, or of a future window, is refused and counted by reason; nothing
is repaired. Where the ranks cannot divide a global batch among themselves, an action that asks for it is adopted for
its sizes, and counted as `tracking`.
"""

from collections import Counter
from typing import Any

import msgspec

from dynamix.schemas.messages import REFUSALS, Action
from dynamix.schemas.messages.allocation import EXACT, Allocation, Split, is_permitted
from dynamix.trainer.job.identity import JobIdentity
from dynamix.trainer.job.options import JobOptions


class Offers:
    """Keeps the newest action that may be adopted."""

    def __init__(self, identity: JobIdentity, options: JobOptions, first: Allocation) -> None:
        """Accept what fits a job that begins with an allocation: with a fixed global batch, only sizes of its sum."""
        self._identity = identity
        self._global_batch_size = first.global_batch_size if options.global_batch == "fixed" else None
        self._options = options
        self._lasting = options.fixed_exchange
        self._newest: Action | None = None
        self._adopted_window = -1
        self._last_refused: tuple[Action, str] | None = None
        """The newest action that was refused since the last boundary, and why."""
        self.num_refused: Counter[str] = Counter()
        """Refused so far, by reason; under `tracking` actions of which only the split was."""
        self._explained: dict[int, dict[str, float | str]] = {}
        """Metrics of the decision for each window to come."""

    def consider(self, action: Action, effective_window: int) -> str | None:
        """Consider an action to start at `effective_window`; returns why it was refused, the first reason, or `None`.

        It is kept as this job can carry it out: with its own exchange, and tracking only where it can.
        """
        identity, options, allocation = self._identity, self._options, action.allocation
        sizes, low, highs = allocation.local_batch_sizes, options.min_local_batch_size, identity.max_local_batch_sizes
        explores_rate = allocation.rate_factor == 1.0 or "learning_rate" in options.explores
        exchange = allocation.exchange
        if exchange == EXACT or self._lasting is not None:
            can_exchange = exchange in (EXACT, self._lasting)
        else:
            can_exchange = len(exchange.shares) in (0, len(highs)) and options.supports_exchange
            can_exchange = can_exchange and is_permitted(exchange, options.exchange, options.named_codecs)
        newest = self._adopted_window if self._newest is None else max(self._adopted_window, self._newest.window)
        misfits: dict[str, bool] = {
            "job": action.job != identity.job,
            "generation": action.generation != identity.generation,
            "future": action.window >= effective_window,  # kept, it would keep out all before it
            "not_newer": action.window <= newest,
            "length": len(sizes) != len(highs),
            "lever": not (explores_rate and can_exchange),
            "sum": self._global_batch_size not in (None, sum(sizes)),
            "bounds": sum(sizes) == 0 or not all(map(lambda size, high: low <= size <= high, sizes, highs)),
        }
        reason = next((reason for reason, holds in misfits.items() if holds), None)
        if reason is not None:
            self._refuse(action, reason)
            return reason
        if self._lasting is not None:
            action = _with(action, exchange=self._lasting)
        if action.allocation.split == "tracking" and not self._options.supports_tracking:
            self.num_refused["tracking"] += 1
            action = _with(action, split="fixed")
        self._newest = action
        return None

    def adopt(self, effective_window: int) -> Action | None:
        """The action to start at `effective_window`, which then counts as adopted; `None` when there is none.

        One decided more than `max_lag_windows` windows earlier is refused as stale.
        """
        action, self._newest = self._newest, None
        if action is not None and effective_window - action.window > self._options.max_lag_windows:
            self._refuse(action, "stale")
            action = None
        if action is not None:
            self._adopted_window = action.window
            what = f"{sum(action.local_batch_sizes)} samples per step"
            divided, exchange = DIVISIONS[action.allocation.split], action.allocation.exchange
            exchanged = "" if exchange == EXACT else f", gradients {exchange.label}"
            self._explained[effective_window] = {
                "decision": "adopted",
                "decided_window": action.window,
                "policy": action.policy,
                "reason": f"policy {action.policy} decided {what} on window {action.window}{divided}{exchanged}",
            }
        elif self._last_refused is not None:
            refused, reason = self._last_refused
            self._explained[effective_window] = {
                "decision": "refused",
                "reason": f"the action of window {refused.window} was refused: {REFUSALS[reason]}",
            }
        self._last_refused = None
        return action

    def take_explanation(self, window: int) -> dict[str, float | str]:
        """Metrics of the decision for a window that has ended; earlier ones are forgotten."""
        found = self._explained.get(window, {"decision": "none", "reason": "no action came for this window"})
        self._explained = {later: noted for later, noted in self._explained.items() if later > window}
        return found

    def _refuse(self, action: Action, reason: str) -> None:
        self.num_refused[reason] += 1
        self._last_refused = action, reason


def _with(action: Action, **levers: Any) -> Action:
    return msgspec.structs.replace(action, allocation=msgspec.structs.replace(action.allocation, **levers))


DIVISIONS: dict[Split, str] = {
    "fixed": "",
    "tracking": ", divided by the ranks",
    "traces": ", until the traces of the nodes' agents say another sum and division",
}
