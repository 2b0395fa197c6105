"""Weights: what a rank's gradient counts in its step, in samples or in counted tokens.

Known from the plan, without a message. Where the script counts in its batches (`attach(count_tokens=...)`) only the
rank that has a batch knows its weight: the total over all ranks is one all-reduce of a number, posted when the last
bucket is ready, so that no rank waits while it computes. Until then gradients are divided by the total of the step
before, and once reduced by what that was wrong.
"""

from collections.abc import Callable
from typing import Protocol

from dynamix.trainer.data.plan import MicroBatch

Total = Callable[[], int]
"""Waits for a number that was posted."""


class TotalExchange(Protocol):
    """How ranks add up a number."""

    def post_total(self, mine: int) -> Total:
        """Begin to add up, over all ranks."""


class StepWeights:
    """The weights of the current step on this rank."""

    def __init__(
        self, exchange: TotalExchange | None = None, *, by_samples: bool = True, base_size: float | None = None
    ) -> None:
        """`exchange` is `None` where the plan knows all weights.

        `base_size`, for losses that are a sum, is a batch of the script as it was written for: plain DDP divides by the
        ranks, and the script by its accumulation steps, so a gradient stays as large as with that batch.
        """
        self._base_size = base_size
        self._size = 1
        self.by_samples = by_samples
        """Whether each sample of a batch has the same part of its weight."""
        self.newest = 0
        """Weight of the newest micro-batch that has one: the scale in which gradients are added up."""
        self.mine = 0
        """Weight of the micro-batches so far."""
        self.expected = 0
        """The total over all ranks, or the last one known; equal on all ranks."""
        self._exchange = exchange
        self._posted: Total | None = None
        self._total: int | None = None

    def begin(self, batch: MicroBatch) -> int | None:
        """Begin a batch; returns in which weight the gradients are that were added up before it, `None` if none."""
        before = self.newest
        if batch.is_first:
            self._size = batch.plan.counts.total
            if self._exchange is None:
                self.expected = batch.plan.counts.total
            else:
                self.expected = self._total or self.expected or batch.plan.counts.total
            self._posted = self._total = None
            self.mine, self.newest = batch.weight, batch.weight
            return None
        self.mine += batch.weight
        self.newest = batch.weight or before
        return before

    def post(self) -> None:
        """Tell all ranks the weight of this rank's step; a collective call where the script counts."""
        if self._exchange is not None and self._posted is None:
            self._posted = self._exchange.post_total(self.mine)

    def total(self) -> int:
        """The weight of the step on all ranks."""
        if self._exchange is None:
            return self.expected
        self.post()
        if self._total is None:
            assert self._posted is not None, "posted above"
            self._total = self._posted()
        return self._total

    def factor(self) -> float:
        """What gradients, weighed and summed over all ranks, are multiplied by; up to `correction`."""
        return 1.0 / self.expected if self._base_size is None else self._base_size / self._size

    def local_factor(self) -> float:
        """What this rank's gradient, weighed, is multiplied by in a local step: it is the mean of its own samples."""
        return (1.0 if self._base_size is None else self._base_size) / self.mine if self.mine else 0.0

    def correction(self) -> float:
        """Factor on a gradient that was divided by `expected`."""
        if self._exchange is None or self._base_size is not None:
            return 1.0
        total = self.total()
        if total == self.expected:
            return 1.0
        return self.expected / total if total else 0.0

    def over_mean(self) -> float:
        """The gradient of the step over that of a loss that is a mean over what counts; 1 where it is one."""
        return 1.0 if self._base_size is None else self._base_size * self.total() / self._size
