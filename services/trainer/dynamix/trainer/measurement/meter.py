"""The meter of one rank: everything that it measures of itself, taken as one row at the end of a window.

The row has a fixed number of float64, gathered by all ranks; the messages are made of these rows. Every whole number in
it is below 2^53 and therefore exact; unknown values are NaN. Numbers that are still on a GPU stay there until the
window ends: one transfer per window, no wait per step.
"""

import math
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from dynamix.schemas.messages import GradientNoise, JobTotals, ParameterDrift, RankRow, SocketCounters
from dynamix.trainer.arguments import number
from dynamix.trainer.data.plan import MicroBatch
from dynamix.trainer.exchange.codec import CodedSquares
from dynamix.trainer.gradient.buckets import SquaredNorms
from dynamix.trainer.gradient.noise import NoiseSums
from dynamix.trainer.gradient.weighting import Reduction
from dynamix.trainer.local_steps.drift import RoundDrift

from .clock import AnyClock, StepTimes
from .energy import unmeasured
from .sockets import PeerSockets, ProcessIdentity, this_process

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


AnswerT = TypeVar("AnswerT")
Scalar = float | torch.Tensor
"""A number, or a tensor of one element."""


def while_it_lives(method: Callable[[], AnswerT], otherwise: AnswerT) -> Callable[[], AnswerT]:
    """A bound method that keeps nothing alive: a meter may outlive the models and the process group that they hold."""
    held = weakref.WeakMethod(method)

    def ask() -> AnswerT:
        living = held()
        return otherwise if living is None else living()

    return ask


class _Batch(NamedTuple):
    batch: MicroBatch
    loss_sum: Scalar | None
    num_correct: Scalar | None
    norms: SquaredNorms


@dataclass(kw_only=True)
class RankMeter:
    """The instruments of one rank, and its batches since the last window ended."""

    rank: int
    local_rank: int
    clock: AnyClock
    sockets: PeerSockets
    device: torch.device
    reduction: Reduction
    times_split: bool
    """Whether a hook sees the gradient's buckets, and so where waiting for others begins."""
    process: ProcessIdentity = field(default_factory=this_process)
    learning_rate: Callable[[], float | None] = lambda: None
    """That of the newest step."""
    coded: Callable[[], CodedSquares] = CodedSquares
    """What codecs with loss were to send and sent, from the beginning on."""
    energy_j: Callable[[], float] = unmeasured
    """Joules since the last call."""
    _taken_s: float = field(default_factory=time.perf_counter, init=False)
    """When the last row was taken."""
    _coded_before: CodedSquares = field(default=CodedSquares(), init=False)
    _data_digest: int = field(default=0, init=False)
    _batches: list[_Batch] = field(default_factory=list, init=False)
    _drifts: list[RoundDrift] = field(default_factory=list, init=False)

    def record_batch(
        self, batch: MicroBatch, loss: Scalar | None, num_correct: Scalar | None, norms: SquaredNorms
    ) -> None:
        """Record a batch: its loss as the user's criterion reduced it. A dummy batch counts for nothing."""
        if batch.is_last and batch.plan.digest is not None:
            self._data_digest = zlib.crc32(batch.plan.digest.to_bytes(4), self._data_digest)
        if batch.weight == 0:
            self._batches.append(_Batch(batch, 0.0, 0.0, norms))
            return
        per_size = batch.size / batch.weight  # what the script counts in a batch, per what batch sizes count
        loss_sum = (
            None if loss is None else _detached("loss", loss) * (batch.size if self.reduction == "mean" else per_size)
        )
        correct = None if num_correct is None else _detached("num_correct", num_correct) * per_size
        self._batches.append(_Batch(batch, loss_sum, correct, norms))

    def record_drift(self, drift: RoundDrift) -> None:
        """Record how far the ranks came apart in a round of local steps."""
        self._drifts.append(drift)

    def take_row(self, times: list[StepTimes], held_out_accuracy: float | None) -> Row:
        """The row of the steps since the last call; `times` are theirs. A sum is unknown if one batch's part is."""
        taken_s, self._taken_s = self._taken_s, time.perf_counter()
        batches, self._batches = self._batches, []
        drifts, self._drifts = self._drifts, []
        return make_row(
            self.local_rank,
            self.process,
            num_samples=sum(each.batch.size for each in batches),
            loss_sum=_sum_if_known([each.loss_sum for each in batches]),
            num_correct=_sum_if_known([each.num_correct for each in batches]),
            times=times,
            times_split=self.times_split,
            noise=self._noise(batches),
            drift=(
                sum(_to_floats([value for each in drifts for value in each.own])),
                sum(_to_floats([value for each in drifts for value in each.mean])),
            ),
            sockets=self.sockets.read(),
            link=self.sockets.take_link(),
            device=device_memory(self.device),
            held_out_accuracy=held_out_accuracy,
            learning_rate=self.learning_rate(),
            coded=self._take_coded(),
            energy_j=self.energy_j(),
            wall_s=self._taken_s - taken_s,
            data_digest=self._data_digest,
        )

    def _take_coded(self) -> CodedSquares:
        """What was coded since the last call."""
        before, self._coded_before = self._coded_before, self.coded()
        return self._coded_before.since(before)

    def _noise(self, batches: Sequence[_Batch]) -> NoiseSums:
        values = iter(_to_floats([value for each in batches for value in (*each.norms.local, *each.norms.reduced)]))
        sums = NoiseSums()
        for each in batches:
            local = sum(next(values) for _ in each.norms.local)
            reduced = sum(next(values) for _ in each.norms.reduced)
            if each.norms.reduced:
                sums.add_step(each.norms.counts or each.batch.plan.counts, self.rank, local, reduced)
        return sums


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """Bytes in use of a whole GPU, by other processes too, and in all; `None` on the CPU, which the collector reads."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def _sum_if_known(values: Sequence[Scalar | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(_to_floats(known)) if len(known) == len(values) else None


def _detached(name: str, value: Scalar) -> Scalar:
    """A number that the user's code cannot change afterwards: at once on the CPU, a copy on the device elsewhere."""
    if not isinstance(value, torch.Tensor):
        return number(f"session.step({name})", value)
    if value.numel() != 1:
        raise TypeError(
            f"session.step({name}): a tensor of shape {tuple(value.shape)}: pass one number, as the criterion reduces "
            "it over the batch"
        )
    return value.detach().clone().float() if value.is_cuda else value.item()


def _to_floats(values: Sequence[Scalar]) -> list[float]:
    """The values as numbers; all that are on a device come over together."""
    tensors = [value.reshape(()).double() for value in values if isinstance(value, torch.Tensor)]
    fetched = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(fetched) if isinstance(value, torch.Tensor) else float(value) for value in values]
