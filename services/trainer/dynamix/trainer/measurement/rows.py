"""The fixed row of float64 that each rank adds to the one gather at a window's end, and the messages made of it.

Every whole number in it is below 2^53 and therefore exact; what is not known is NaN.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dynamix.schemas.messages import GradientNoise, JobTotals, ParameterDrift, RankRow, SocketCounters
from dynamix.trainer.gradient.noise import NoiseSums

from .clock import StepTimes
from .process import ProcessIdentity

UNKNOWN = math.nan


class Row(NamedTuple):
    """What one rank measured in one window, as numbers."""

    local_rank: float
    pid: float
    pid_start_ticks: float
    pid_namespace: float
    uid: float
    num_samples: float
    loss_sum: float
    num_correct: float
    data_time_s: float
    compute_time_s: float
    sync_time_s: float
    update_time_s: float
    tx_bytes: float
    rx_bytes: float
    retransmits: float
    srtt_us: float
    device_memory_bytes: float
    device_memory_total_bytes: float
    held_out_accuracy: float
    noise_num_steps: float
    noise_local_trace: float
    noise_local_signal: float
    noise_global_trace: float
    noise_global_signal: float
    times_split: float
    """1 where compute and sync were measured separately, else 0."""
    drift_own: float
    drift_mean: float
    """The rank's addend, and what all ranks know (`local_steps.drift`); 0 without local steps."""
    learning_rate: float
    coded_wanted: float
    coded_sent: float
    """Squares of what codecs with loss should have sent and of what they sent; 0 where none ruled."""
    link_bytes_per_s: float
    link_peer: float
    """While it sent, to the rank with which it was fastest."""
    energy_j: float
    """Joules of the devices that this rank counts; 0 where another one counts them."""
    wall_s: float
    """Since the row before was taken, also between steps."""
    data_digest: float
    """The digest of the samples of a stream that were read so far, equal on all ranks; 0 for other data."""

    @property
    def time_s(self) -> float:
        """Sum of the window's step times."""
        return self.data_time_s + self.compute_time_s + self.sync_time_s + self.update_time_s

    @property
    def noise(self) -> NoiseSums:
        """The rank's part of the noise estimate."""
        return NoiseSums(
            int(self.noise_num_steps),
            self.noise_local_trace,
            self.noise_local_signal,
            self.noise_global_trace,
            self.noise_global_signal,
        )

    @property
    def sockets(self) -> SocketCounters | None:
        """The rank's socket counters, if it has sockets that can be read."""
        if math.isnan(self.tx_bytes):
            return None
        return SocketCounters(
            tx_bytes=int(self.tx_bytes),
            rx_bytes=int(self.rx_bytes),
            retransmits=int(self.retransmits),
            srtt_us=_known(self.srtt_us),
        )

    @property
    def accuracy(self) -> float | None:
        """Mean training accuracy of the rank; `None` without samples or when the script does not count."""
        return None if math.isnan(self.num_correct) or self.num_samples == 0 else self.num_correct / self.num_samples


NUM_COLUMNS = len(Row._fields)


def make_row(
    local_rank: int,
    process: ProcessIdentity,
    *,
    num_samples: int,
    loss_sum: float | None,
    num_correct: float | None,
    times: Iterable[StepTimes],
    times_split: bool,
    noise: NoiseSums,
    sockets: SocketCounters | None,
    held_out_accuracy: float | None,
    device: tuple[int, int] | None = None,
    drift: tuple[float, float] = (0.0, 0.0),
    learning_rate: float | None = None,
    coded: tuple[float, float] = (0.0, 0.0),
    link: tuple[float, int] | None = None,
    energy_j: float = UNKNOWN,
    wall_s: float = UNKNOWN,
    data_digest: int = 0,
) -> Row:
    """One rank's row; `device` is its memory in bytes, used and in all. A loss that is not finite is none.

    `coded` are squares, of what codecs with loss should have sent and of what they sent; `link` is the rate of sending
    to the rank with which it was fastest, in bytes per second, and that rank.
    """
    steps = list(times)
    device_memory, device_memory_total = device or (UNKNOWN, UNKNOWN)
    link_bytes_per_s, link_peer = link or (UNKNOWN, UNKNOWN)
    return Row(
        local_rank=local_rank,
        pid=process.pid,
        pid_start_ticks=process.start_ticks,
        pid_namespace=process.namespace,
        uid=process.uid,
        num_samples=num_samples,
        loss_sum=_number(loss_sum),
        num_correct=_number(num_correct),
        data_time_s=sum(step.data_s for step in steps),
        compute_time_s=sum(step.compute_s for step in steps),
        sync_time_s=sum(step.sync_s for step in steps),
        update_time_s=sum(step.update_s for step in steps),
        tx_bytes=UNKNOWN if sockets is None else sockets.tx_bytes,
        rx_bytes=UNKNOWN if sockets is None else sockets.rx_bytes,
        retransmits=UNKNOWN if sockets is None else sockets.retransmits,
        srtt_us=UNKNOWN if sockets is None else _number(sockets.srtt_us),
        device_memory_bytes=device_memory,
        device_memory_total_bytes=device_memory_total,
        held_out_accuracy=_number(held_out_accuracy),
        noise_num_steps=noise.num_steps,
        noise_local_trace=noise.local_trace,
        noise_local_signal=noise.local_signal,
        noise_global_trace=noise.global_trace,
        noise_global_signal=noise.global_signal,
        times_split=times_split,
        drift_own=drift[0],
        drift_mean=drift[1],
        learning_rate=_number(learning_rate),
        coded_wanted=coded[0],
        coded_sent=coded[1],
        link_bytes_per_s=link_bytes_per_s,
        link_peer=link_peer,
        energy_j=energy_j,
        wall_s=wall_s,
        data_digest=data_digest,
    )


def rank_row(
    rank: int,
    row: Row,
    before: Row | None,
    *,
    local_batch_size: int,
    pending_local_batch_size: int,
    cookies: tuple[int, ...] = (),
) -> RankRow:
    """The message's row of a rank, with what is needed of its row one window earlier; sockets count since attach."""
    nothing = None if row.sockets is None else SocketCounters(tx_bytes=0, rx_bytes=0, retransmits=0)
    return RankRow(
        rank=rank,
        local_rank=int(row.local_rank),
        pid=int(row.pid),
        pid_start_ticks=int(row.pid_start_ticks),
        pid_namespace=int(row.pid_namespace),
        uid=int(row.uid),
        local_batch_size=local_batch_size,
        pending_local_batch_size=pending_local_batch_size,
        num_samples=int(row.num_samples),
        loss_sum=_known(row.loss_sum),
        num_correct=_known(row.num_correct),
        data_time_s=row.data_time_s,
        compute_time_s=row.compute_time_s,
        sync_time_s=row.sync_time_s,
        update_time_s=row.update_time_s,
        sockets=row.sockets,
        sockets_before=nothing if before is None else before.sockets,
        accuracy_before=None if before is None else before.accuracy,
        device_memory_bytes=_whole(row.device_memory_bytes),
        device_memory_total_bytes=_whole(row.device_memory_total_bytes),
        times_split=bool(row.times_split),
        cookies=cookies,
        link_bytes_per_s=_known(row.link_bytes_per_s),
        link_peer=_whole(row.link_peer),
    )


def job_totals(
    rows: Sequence[Row], *, window: int, num_steps: int, global_batch_size: int, noise: GradientNoise | None = None
) -> JobTotals:
    """Sums over all ranks, in rank order: the same numbers wherever they are computed."""
    return JobTotals(
        window=window,
        num_steps=num_steps,
        num_samples=int(sum(row.num_samples for row in rows)),
        global_batch_size=global_batch_size,
        loss_sum=_known(sum(row.loss_sum for row in rows)),
        num_correct=_known(sum(row.num_correct for row in rows)),
        time_s=max(row.time_s for row in rows),
        noise=noise,
        drift=_drift(rows),
        learning_rate=_known(rows[0].learning_rate),
        gradient_norm=_gradient_norm(noise, global_batch_size),
        coding_gain=_coding_gain(rows),
    )


def energy_j(rows: Sequence[Row]) -> float | None:
    """Joules of all ranks' devices; unknown where one of them is."""
    return _known(sum(row.energy_j for row in rows))


def wall_s(rows: Sequence[Row]) -> float:
    """How long the window lasted, on the rank on which it lasted longest; NaN where one does not know."""
    return math.nan if any(math.isnan(row.wall_s) for row in rows) else max(row.wall_s for row in rows)


def held_out_accuracy(rows: Sequence[Row]) -> float | None:
    """The newest evaluation, as the lowest rank that has one knows it."""
    return next((row.held_out_accuracy for row in rows if not math.isnan(row.held_out_accuracy)), None)


def _drift(rows: Sequence[Row]) -> ParameterDrift | None:
    """The drift of all ranks; |d|^2 is rank 0's, since on mixed processors its last bits may differ."""
    moved, own = rows[0].drift_mean, sum(row.drift_own for row in rows)
    if not (0.0 < moved < math.inf and own < math.inf):
        return None
    return ParameterDrift(spread=max(own - moved, 0.0), moved=moved)


def _gradient_norm(noise: GradientNoise | None, global_batch_size: int) -> float | None:
    """Norm of a step's gradient: E|g|^2 = |G_true|^2 + S / B; unknown where the estimate of it is not positive."""
    if noise is None or global_batch_size < 1:
        return None
    squared = noise.squared_norm + noise.trace / global_batch_size
    return math.sqrt(squared) if 0 < squared < math.inf else None


def _coding_gain(rows: Sequence[Row]) -> float | None:
    """Over all ranks; unknown where no codec with loss ruled, or something was not finite."""
    wanted, sent = (sum(getattr(row, name) for row in rows) for name in ("coded_wanted", "coded_sent"))
    return sent / wanted if 0 < wanted < math.inf and sent < math.inf else None


def _number(value: float | None) -> float:
    return UNKNOWN if value is None or not math.isfinite(value) else value


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)
