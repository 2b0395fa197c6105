"""The metric windows of a job as arrays over windows and ranks. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamix.schemas.messages import MetricWindow, OptimizerFamily, RankMetrics

Array64 = npt.NDArray[np.float64]

MIN_WINDOWS = 8
"""With fewer windows a line cannot be told from scatter."""


class NotEnoughWindowsError(ValueError):
    """The windows cannot be fitted; the text says what is missing and how to get it."""


class Observations(NamedTuple):
    """Complete windows: every rank is there, and its compute and sync times are known.

    Times are means per step, in seconds; arrays are windows x ranks unless said otherwise, NaN where unknown.
    """

    window: Array64
    """Number of each window."""
    begin_s: Array64
    """Training time at which each window began, by the durations of all windows before it, those left out as well."""
    num_steps: Array64
    """Steps in each window."""
    samples: Array64
    """Samples of a rank per step."""
    busy_s: Array64
    """Data, compute and update time: the work of a rank between two barriers; compute time of the virtual clock."""
    sync_s: Array64
    step_s: Array64
    """Mean step time of the job in each window."""
    tx_bytes: Array64
    """Bytes sent by a rank per step."""
    retransmits: Array64
    """Retransmitted segments in the whole window."""
    srtt_us: Array64
    held_out_accuracy: Array64
    """Newest evaluation by the end of each window."""

    @property
    def world_size(self) -> int:
        """Number of ranks, N."""
        return int(self.samples.shape[1])

    @property
    def duration_s(self) -> Array64:
        """Duration of each window, in seconds."""
        return self.num_steps * self.step_s

    def select(self, index: npt.NDArray[np.intp]) -> "Observations":
        """Return the observations of some windows."""
        return Observations(*(array[index] for array in self))


class Origin(NamedTuple):
    """What observations were made from."""

    optimizer_family: OptimizerFamily
    num_left_out: int
    """Incomplete windows, and the first of each generation: caches and connections are cold in it."""


def observe(windows: Iterable[MetricWindow]) -> tuple[Observations, Origin]:
    """Join the nodes' windows of one job, in order of generation and window.

    Raises:
        NotEnoughWindowsError: when fewer than `MIN_WINDOWS` are complete.
    """
    joined: dict[tuple[int, int], list[MetricWindow]] = defaultdict(list)
    for window in windows:
        joined[window.generation, window.window].append(window)
    world_size = max((len(_ranks(nodes)) for nodes in joined.values()), default=0)
    begins_s = _begins_s(joined)
    keys = [key for key, nodes in sorted(joined.items()) if key[1] > 0 and _is_whole(nodes, world_size)]
    whole = [joined[key] for key in keys]
    if len(whole) < MIN_WINDOWS:
        raise NotEnoughWindowsError(
            f"{len(whole)} of {len(joined)} windows can be used, {MIN_WINDOWS} are the least: a window needs the "
            "compute and sync times of every rank, which DDP's communication hook measures; let the job run longer"
        )
    rows = [[_row(rank, nodes[0].num_steps) for rank in _ranks(nodes)] for nodes in whole]
    columns = np.array(rows, dtype=np.float64)
    seen = Observations(
        window=_per_window(nodes[0].window for nodes in whole),
        begin_s=_per_window(begins_s[key] for key in keys),
        num_steps=_per_window(nodes[0].num_steps for nodes in whole),
        samples=columns[:, :, 0],
        busy_s=columns[:, :, 1],
        sync_s=columns[:, :, 2],
        step_s=_per_window(nodes[0].job_metrics.step_time_s for nodes in whole),
        tx_bytes=columns[:, :, 3],
        retransmits=columns[:, :, 4],
        srtt_us=columns[:, :, 5],
        held_out_accuracy=_per_window(nodes[0].job_metrics.held_out_accuracy for nodes in whole),
    )
    return seen, Origin(whole[0][0].optimizer_family, len(joined) - len(whole))


def _begins_s(joined: Mapping[tuple[int, int], Sequence[MetricWindow]]) -> dict[tuple[int, int], float]:
    """Return training times by generation and window; a window that is not there took as long as those around it."""
    begins_s: dict[tuple[int, int], float] = {}
    durations_s: dict[int, dict[int, float]] = defaultdict(dict)
    for (generation, number), nodes in sorted(joined.items()):
        durations_s[generation][number] = nodes[0].num_steps * nodes[0].job_metrics.step_time_s
    before_s = 0.0
    for generation, known in durations_s.items():
        ends_s = before_s + np.cumsum(np.interp(np.arange(max(known) + 1), list(known), list(known.values())))
        begins_s |= {(generation, number): float(ends_s[number]) - known[number] for number in known}
        before_s = float(ends_s[-1])
    return begins_s


def _per_window(values: Iterable[float | None]) -> Array64:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _is_whole(nodes: Sequence[MetricWindow], world_size: int) -> bool:
    return (
        len(_ranks(nodes)) == world_size
        and nodes[0].num_steps > 0
        and all(rank.training.sync_time_s is not None for rank in _ranks(nodes))
    )


def _ranks(nodes: Sequence[MetricWindow]) -> list[RankMetrics]:
    return sorted((rank for node in nodes for rank in node.ranks), key=lambda rank: rank.rank)


def _row(rank: RankMetrics, num_steps: int) -> tuple[float, ...]:
    """Return samples, busy time, sync time and bytes sent per step, then retransmissions and round trip time."""
    training, network = rank.training, rank.network
    busy_s = training.data_time_s + (training.compute_time_s or 0.0) + training.update_time_s
    traffic = (np.nan, np.nan, np.nan)
    if network is not None:
        srtt_us = np.nan if network.srtt_us is None else network.srtt_us
        traffic = (network.tx_bytes / num_steps, float(network.retransmits), srtt_us)
    return (training.num_samples / num_steps, busy_s, training.sync_time_s or 0.0, *traffic)
