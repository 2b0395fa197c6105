"""The meter of one rank: everything that it measures of itself, taken as one row at the end of a window.

All ranks gather these rows; the messages are made of them. Numbers that are still on a GPU stay there until the
window ends: one transfer per window, no wait per step.
"""

import math
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec
import torch

from dynamix.schemas.messages import GradientNoise, JobTotals, ParameterDrift, RankRow, SocketCounters
from dynamix.trainer.arguments import number
from dynamix.trainer.data.plan import MicroBatch
from dynamix.trainer.exchange.codec import CodedSquares
from dynamix.trainer.gradient.hook import Reduction, SquaredNorms
from dynamix.trainer.gradient.noise import NoiseSums
from dynamix.trainer.local_steps import RoundDrift

from .clock import AnyClock, StepTimes
from .energy import unmeasured
from .sockets import PeerSockets, ProcessIdentity, this_process


class Row(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Measurements of one rank in one window; all ranks gather them. Floats that are not finite count as unknown."""

    local_rank: int
    process: ProcessIdentity
    num_samples: int
    loss_sum: float | None
    num_correct: float | None
    times: StepTimes
    """Sums over the steps."""
    times_split: bool
    """Whether compute and sync were measured separately."""
    noise: NoiseSums
    """The rank's part of the noise estimate."""
    sockets: SocketCounters | None
    """`None` without sockets that can be read."""
    held_out_accuracy: float | None
    device: tuple[int, int] | None = None
    """Memory of the device in bytes, used and in all."""
    drift: tuple[float, float] = (0.0, 0.0)
    """The rank's addend, and what all ranks know (`RoundDrift`); 0 without local steps."""
    learning_rate: float | None = None
    coded: CodedSquares = CodedSquares()
    """Squares of what codecs with loss should have sent and of what they sent."""
    link: tuple[float, int] | None = None
    """Bytes per second while it sent to the rank with which it was fastest, and that rank."""
    energy_j: float | None = None
    """Joules of the devices that this rank counts; 0 where another one counts them."""
    wall_s: float | None = None
    """Since the row before was taken, also between steps."""
    data_digest: int = 0
    """The digest of the samples of a stream that were read so far, equal on all ranks; 0 for other data."""

    def __post_init__(self) -> None:
        """Forget what is not finite, such as the loss of a run that diverged."""
        for name in ("loss_sum", "num_correct", "held_out_accuracy", "learning_rate", "energy_j", "wall_s"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                msgspec.structs.force_setattr(self, name, None)

    @property
    def accuracy(self) -> float | None:
        """Mean training accuracy of the rank; `None` without samples or when the script does not count."""
        return None if self.num_correct is None or self.num_samples == 0 else self.num_correct / self.num_samples


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
    memory, memory_total = row.device or (None, None)
    link_bytes_per_s, link_peer = row.link or (None, None)
    return RankRow(
        rank=rank,
        local_rank=row.local_rank,
        pid=row.process.pid,
        pid_start_ticks=row.process.start_ticks,
        pid_namespace=row.process.namespace,
        uid=row.process.uid,
        local_batch_size=local_batch_size,
        pending_local_batch_size=pending_local_batch_size,
        num_samples=row.num_samples,
        loss_sum=row.loss_sum,
        num_correct=row.num_correct,
        data_time_s=row.times.data_s,
        compute_time_s=row.times.compute_s,
        sync_time_s=row.times.sync_s,
        update_time_s=row.times.update_s,
        sockets=row.sockets,
        sockets_before=nothing if before is None else before.sockets,
        accuracy_before=None if before is None else before.accuracy,
        device_memory_bytes=memory,
        device_memory_total_bytes=memory_total,
        times_split=row.times_split,
        cookies=cookies,
        link_bytes_per_s=link_bytes_per_s,
        link_peer=link_peer,
    )


def job_totals(
    rows: Sequence[Row], *, window: int, num_steps: int, global_batch_size: int, noise: GradientNoise | None = None
) -> JobTotals:
    """Sums over all ranks, in rank order: the same numbers wherever they are computed."""
    return JobTotals(
        window=window,
        num_steps=num_steps,
        num_samples=sum(row.num_samples for row in rows),
        global_batch_size=global_batch_size,
        loss_sum=_total([row.loss_sum for row in rows]),
        num_correct=_total([row.num_correct for row in rows]),
        time_s=max(row.times.step_s for row in rows),
        noise=noise,
        drift=_drift(rows),
        learning_rate=rows[0].learning_rate,
        gradient_norm=_gradient_norm(noise, global_batch_size),
        coding_gain=_coding_gain(rows),
    )


def energy_j(rows: Sequence[Row]) -> float | None:
    """Joules of all ranks' devices; unknown where one of them is."""
    return _total([row.energy_j for row in rows])


def wall_s(rows: Sequence[Row]) -> float:
    """Duration of the window on the slowest rank; infinite if a rank does not know it."""
    return max(math.inf if row.wall_s is None else row.wall_s for row in rows)


def held_out_accuracy(rows: Sequence[Row]) -> float | None:
    """The newest evaluation, as the lowest rank that has one knows it."""
    return next((row.held_out_accuracy for row in rows if row.held_out_accuracy is not None), None)


def _drift(rows: Sequence[Row]) -> ParameterDrift | None:
    """The drift of all ranks; |d|^2 is rank 0's, since on mixed processors its last bits may differ."""
    moved, own = rows[0].drift[1], sum(row.drift[0] for row in rows)
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
    """Squared norm of what was sent, over what should have been; unknown without a lossy codec."""
    wanted, sent = sum(row.coded.wanted for row in rows), sum(row.coded.sent for row in rows)
    return sent / wanted if 0 < wanted < math.inf and sent < math.inf else None


def _total(values: Sequence[float | None]) -> float | None:
    """Their sum; unknown where one of them is."""
    known = [value for value in values if value is not None]
    return float(sum(known)) if len(known) == len(values) else None


NO_TIMES = StepTimes(0.0, 0.0, 0.0, 0.0)

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
    """Whether a hook sees the gradient's buckets, and thus the start of waiting for others."""
    process: ProcessIdentity = field(default_factory=this_process)
    learning_rate: Callable[[], float | None] = lambda: None
    """Learning rate of the newest step."""
    coded: Callable[[], CodedSquares] = CodedSquares
    """Squared norms of what lossy codecs sent and should have sent, since the start."""
    energy_j: Callable[[], float] = unmeasured
    """Joules since the last call."""
    _taken_s: float = field(default_factory=time.perf_counter, init=False)
    """Time of the last row."""
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
        return Row(
            local_rank=self.local_rank,
            process=self.process,
            num_samples=sum(each.batch.size for each in batches),
            loss_sum=_sum_if_known([each.loss_sum for each in batches]),
            num_correct=_sum_if_known([each.num_correct for each in batches]),
            times=StepTimes(*(float(sum(part)) for part in zip(*times, strict=True))) if times else NO_TIMES,
            times_split=self.times_split,
            noise=self._noise(batches),
            drift=(
                float(sum(_to_floats([value for each in drifts for value in each.own]))),
                float(sum(_to_floats([value for each in drifts for value in each.mean]))),
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
        """Squared norms of lossy codecs since the last call."""
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
    return float(sum(_to_floats(known))) if len(known) == len(values) else None


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
