"""The field: the traces of all agents of a job, and the sizes that follow from them. Pure, and equal on all ranks.

Under the policy `stigmergy` no centre decides. Once per window the ranks of each node add the newest trace of their own
agent to one sum over all ranks: so all have the same field, to the bit, and come to the same sizes by the same
arithmetic (as in `fast_loop`). A trace loses the share `evaporation` of its strength in each window in which no newer
one comes. The global batch is the mean appetite of all cells, weighted by strength. Its division is by activity, which
does not weaken; once such a trace has gone, its ranks keep the share that they have.
"""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add

import msgspec

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages import FieldView, NodeRanks, SeenTrace, Trace
from dynamix.trainer.data.plan import Schedule

from .fast_loop import DEAD_BAND

GONE = 0.01
"""Strength below which there is no trace any more."""

LAG_WINDOWS = 2
"""Windows between the window of a trace and the window in which it takes effect."""

PER_CELL = 3
"""Numbers of a cell besides its ranks' activities: appetite, waiting, and window + 1, where 0 stands for no trace."""


class TraceField:
    """The field of one job, at most one trace per node."""

    def __init__(self, nodes: Sequence[NodeRanks], view: FieldView) -> None:
        """`view` has what all agents see alike."""
        self._nodes = tuple(nodes)
        self._index = {node.node: index for index, node in enumerate(self._nodes)}
        self._num_ranks = sum(len(node.ranks) for node in self._nodes)
        self._view = view
        self._activity = [0.0] * self._num_ranks
        self._cells: list[SeenTrace | None] = [None] * len(self._nodes)

    def numbers_of(self, traces: Mapping[str, Trace]) -> list[float]:
        """The numbers of these traces, by node, and zero for missing or unusable traces."""
        numbers = [0.0] * (self._num_ranks + PER_CELL * len(self._nodes))
        for name, trace in traces.items():
            index = self._index.get(name)
            if index is None or trace.ranks != self._nodes[index].ranks or len(trace.activity) != len(trace.ranks):
                continue
            for rank, activity in zip(trace.ranks, trace.activity, strict=True):
                numbers[rank] = activity
            at = self._num_ranks + PER_CELL * index
            numbers[at : at + PER_CELL] = [trace.appetite, trace.waiting_s, float(trace.window + 1)]
        return numbers

    def take(self, numbers: Sequence[float], window: int) -> None:
        """Take the sum over all ranks as the field from the beginning of `window`."""
        self._activity = list(numbers[: self._num_ranks])
        for index, node in enumerate(self._nodes):
            at = self._num_ranks + PER_CELL * index
            appetite, waiting_s, after = numbers[at : at + PER_CELL]
            strength, left = float(after > 0), 1.0 - self._view.options["evaporation"]
            for _ in range(window - LAG_WINDOWS - (int(after) - 1)):  # a power differs in its last bit between machines
                if strength < GONE:
                    break
                strength *= left
            if strength >= GONE:
                self._cells[index] = SeenTrace(strength=strength, appetite=appetite, waiting_s=waiting_s)
                continue
            self._cells[index] = None
            for rank in node.ranks:
                self._activity[rank] = 0.0

    def revise(self, schedule: Schedule, effective_step: int, fewest: int, upper: Sequence[int]) -> None:
        """Activate better sizes from a step on, if the policy uses traces and there are any."""
        newest = schedule.newest
        if newest.split != "traces":
            return
        better = self.better_sizes(newest.local_batch_sizes, fewest, upper)
        if better is not None and better != newest.local_batch_sizes:
            schedule.revise(effective_step, newest.with_sizes(better))

    def better_sizes(self, sizes: Sequence[int], fewest: int, upper: Sequence[int]) -> tuple[int, ...] | None:
        """The sizes that shall replace `sizes`, between `fewest` and `upper`; `None` where these are good enough."""
        weights = self._weights(sizes)
        if weights is None:
            return None
        total = self._total(sum(sizes))
        if fewest == 0 and total >= len(weights):
            fewest = 1  # a rank without samples would never be measured again
        proposed = apportion(total, weights, [min(fewest, most) for most in upper], upper)
        if sum(proposed) == sum(sizes) and _slowest(proposed, weights) >= (1.0 - DEAD_BAND) * _slowest(sizes, weights):
            return None
        return proposed

    def view(self, node: str) -> FieldView:
        """An agent's view: its own cell, and those beside it."""
        index = self._index[node]
        beside = sorted({(index + step) % len(self._cells) for step in (-1, 1)} - {index})
        return msgspec.structs.replace(
            self._view,
            activity=tuple(self._activity[rank] for rank in self._nodes[index].ranks),
            own=self._cells[index],
            around=tuple(seen for each in beside if (seen := self._cells[each]) is not None),
        )

    def _weights(self, sizes: Sequence[int]) -> list[float] | None:
        """Weights of the division: activities; ranks without one keep their share."""
        known = [rank for rank, activity in enumerate(self._activity) if activity > 0.0]
        active, taken = reduce(add, (self._activity[rank] for rank in known), 0.0), sum(sizes[rank] for rank in known)
        if not (taken and active < math.inf):
            return None
        per_sample = active / taken
        return [
            activity if activity > 0.0 else size * per_sample
            for activity, size in zip(self._activity, sizes, strict=True)
        ]

    def _total(self, in_force: int) -> int:
        """The global batch: the mean appetite if it is further from the current one than the dead band."""
        cells = [cell for cell in self._cells if cell is not None and cell.appetite > 0.0]
        strength = reduce(add, (cell.strength for cell in cells), 0.0)  # `sum` adds differently from Python 3.12 on
        if self._view.keeps_global_batch or strength == 0.0:
            return in_force
        mean = reduce(add, (cell.strength * cell.appetite for cell in cells), 0.0) / strength
        if not abs(mean - in_force) > self._view.options["dead_band"] * in_force or mean >= 2.0**52:
            return in_force
        return max(int(mean + 0.5), 1)


def _slowest(sizes: Sequence[int], weights: Sequence[float]) -> float:
    """Predicted compute time of the slowest rank; one of no weight was never measured, and has no samples."""
    return max(size / weight for size, weight in zip(sizes, weights, strict=True) if weight > 0.0)
