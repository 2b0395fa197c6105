"""The meter of one rank: everything that it measures of itself, taken as one row at the end of a window.

All ranks gather these rows; the messages are made of them. Numbers that are still on a GPU stay there until the
window ends: one transfer per window, no wait per step.
"""

import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch

from dynamix.schemas.messages import GradientNoise, JobTotals, RankRow, Summary
from dynamix.trainer.arguments import checked
from dynamix.trainer.data.plan import MicroBatch
from dynamix.trainer.exchange.codec import CodedSquares
from dynamix.trainer.gradient.clock import Clock, StepTimes
from dynamix.trainer.gradient.hook import Reduction
from dynamix.trainer.gradient.noise import NOT_MEASURED, NoiseSums, SquaredNorms

from .sockets import PeerSockets, ProcessIdentity, this_process


class Row(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Measurements of one rank in one window; all ranks gather them. Floats that are not finite count as unknown."""

    rank: RankRow
    """As its node's report has it; `run.Reporter` adds the sizes, the cookies and what is of the window before."""
    noise: NoiseSums
    """The rank's part of the noise estimate."""
    held_out_accuracy: float | None
    learning_rate: float | None = None
    coded: CodedSquares = CodedSquares()
    """Squares of what codecs with loss should have sent and of what they sent."""
    wall_s: float | None = None
    """Since the row before was taken, also between steps."""
    data_digest: int = 0
    """The digest of the samples of a stream that were read so far, equal on all ranks; 0 for other data."""

    def __post_init__(self) -> None:
        """Forget what is not finite, such as the loss of a run that diverged."""
        own = ("held_out_accuracy", "learning_rate", "wall_s")
        for struct, names in ((self, own), (self.rank, ("loss_sum", "num_correct"))):
            for name in names:
                value = getattr(struct, name)
                if value is not None and not math.isfinite(value):
                    msgspec.structs.force_setattr(struct, name, None)

    @property
    def accuracy(self) -> float | None:
        """Mean training accuracy of the rank; `None` without samples or when the script does not count."""
        correct, num_samples = self.rank.num_correct, self.rank.num_samples
        return None if correct is None or num_samples == 0 else correct / num_samples


ROWS = msgspec.msgpack.Decoder(Row)
"""Made once: to make one takes longer than to decode."""


def job_totals(
    rows: Sequence[Row], *, window: int, num_steps: int, global_batch_size: int, noise: GradientNoise | None = None
) -> JobTotals:
    """Sums over all ranks, in rank order: the same numbers wherever they are computed."""
    ranks = [row.rank for row in rows]
    gradient_norm = coding_gain = None
    if noise is not None and global_batch_size > 0:
        squared = noise.squared_norm + noise.trace / global_batch_size  # E|g|^2 = |G_true|^2 + S / B
        gradient_norm = math.sqrt(squared) if 0 < squared < math.inf else None
    wanted, sent = sum(row.coded.wanted for row in rows), sum(row.coded.sent for row in rows)
    if 0 < wanted < math.inf and sent < math.inf:  # else no codec with loss was active
        coding_gain = sent / wanted
    return JobTotals(
        window=window,
        num_steps=num_steps,
        num_samples=sum(each.num_samples for each in ranks),
        global_batch_size=global_batch_size,
        loss_sum=_total([each.loss_sum for each in ranks]),
        num_correct=_total([each.num_correct for each in ranks]),
        time_s=max(each.data_time_s + each.compute_time_s + each.sync_time_s + each.update_time_s for each in ranks),
        noise=noise,
        learning_rate=rows[0].learning_rate,
        gradient_norm=gradient_norm,
        coding_gain=coding_gain,
    )


def held_out_accuracy(rows: Sequence[Row]) -> float | None:
    """The newest evaluation, as the lowest rank that has one knows it."""
    return next((row.held_out_accuracy for row in rows if row.held_out_accuracy is not None), None)


class Gains:
    """Adds up over windows what a job took, and would have taken with equal sizes: `summary` says what was gained.

    A rank that took t for b samples, of which the fixed cost is worth K, takes t (K + b') / (K + b) for b' (the model
    of the fast loop); the rest of a step stays as it is.
    """

    def __init__(self) -> None:
        self._num_steps = self._num_samples = 0
        self._taken_s = self._equal_s = self._script_s = 0.0
        self._other_batch = False

    def observe_window(
        self, rows: Sequence[Row], totals: JobTotals, fixed: Sequence[float], script_batch_size: int, *, is_other: bool
    ) -> None:
        """Add a window; `fixed` are the fixed costs by rank, in samples. `is_other`: its batch was not the script's."""
        self._num_steps += totals.num_steps
        self._num_samples += totals.num_samples
        self._taken_s += totals.time_s
        if not all(row.rank.times_split for row in rows) or not totals.num_samples:
            self._equal_s = self._script_s = math.nan
            return
        longest_s = max(row.rank.compute_time_s for row in rows)

        def time_s(size: float) -> float:
            """Time of the window's samples in steps of this size on each rank."""
            others = [
                row.rank.compute_time_s * (more + size) / (more + row.rank.num_samples / totals.num_steps)
                for row, more in zip(rows, fixed, strict=True)
                if row.rank.num_samples
            ]
            return (totals.time_s - longest_s + max(others)) * mean_size / size

        mean_size = totals.num_samples / totals.num_steps / len(rows)
        self._equal_s += time_s(mean_size)
        self._script_s += time_s(script_batch_size / len(rows) if is_other else mean_size)
        self._other_batch = self._other_batch or is_other

    def summary(self, own_s: float) -> Summary | None:
        """The gain so far; `None` before a window has ended."""
        if not self._num_steps:
            return None
        return Summary(
            num_steps=self._num_steps,
            num_samples=self._num_samples,
            time_s=self._taken_s,
            own_s=own_s,
            equal_sizes_s=self._equal_s if math.isfinite(self._equal_s) else None,
            script_batch_s=self._script_s if self._other_batch and math.isfinite(self._script_s) else None,
        )


Scalar = float | torch.Tensor
"""A number, or a tensor of one element."""


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
    clock: Clock
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
    _taken_s: float = field(default_factory=time.perf_counter, init=False)
    """Time of the last row."""
    _coded_before: CodedSquares = field(default=CodedSquares(), init=False)
    _data_digest: int = field(default=0, init=False)
    _batches: list[_Batch] = field(default_factory=list, init=False)

    def record_batch(
        self,
        batch: MicroBatch,
        loss: Scalar | None,
        num_correct: Scalar | None,
        norms: SquaredNorms = NOT_MEASURED,
    ) -> None:
        """Record a batch: its loss as the user's criterion reduced it, `detached`. A dummy batch counts for nothing."""
        if batch.is_last and batch.plan.digest is not None:
            self._data_digest = zlib.crc32(batch.plan.digest.to_bytes(4), self._data_digest)
        if batch.weight == 0:
            self._batches.append(_Batch(batch, 0.0, 0.0, norms))
            return
        per_size = batch.size / batch.weight  # what the script counts in a batch, per what batch sizes count
        if loss is not None:
            loss = loss * (batch.size if self.reduction == "mean" else per_size)
        if num_correct is not None:
            num_correct = num_correct * per_size
        self._batches.append(_Batch(batch, loss, num_correct, norms))

    def take_row(
        self, times: list[StepTimes], held_out_accuracy: float | None, waiting_time_s: float | None = None
    ) -> Row:
        """The row of the steps since the last call; `times` are theirs. A sum is unknown if one batch's part is."""
        taken_s, self._taken_s = self._taken_s, time.perf_counter()
        batches, self._batches = self._batches, []
        sockets, (link_bytes_per_s, link_peer) = self.sockets.read(), self.sockets.take_link()
        memory_bytes = memory_total_bytes = None  # on a CPU the collector reads it
        if self.device.type == "cuda":  # of the whole GPU, by other processes too
            free_bytes, memory_total_bytes = torch.cuda.mem_get_info(self.device)
            memory_bytes = memory_total_bytes - free_bytes
        values = iter(_to_floats([value for each in batches for value in (*each.norms.local, *each.norms.reduced)]))
        noise = NoiseSums()
        for each in batches:
            local = sum(next(values) for _ in each.norms.local)
            reduced = sum(next(values) for _ in each.norms.reduced)
            if each.norms.reduced:
                noise.add_step(each.norms.counts or each.batch.plan.counts, self.rank, local, reduced)
        coded_before, self._coded_before = self._coded_before, self.coded()
        return Row(
            rank=RankRow(
                rank=self.rank,
                local_rank=self.local_rank,
                **self.process._asdict(),
                local_batch_size=0,
                pending_local_batch_size=0,
                num_samples=sum(each.batch.size for each in batches),
                loss_sum=_total([each.loss_sum for each in batches]),
                num_correct=_total([each.num_correct for each in batches]),
                data_time_s=sum((each.data_s for each in times), 0.0),
                compute_time_s=sum((each.compute_s for each in times), 0.0),
                sync_time_s=sum((each.sync_s for each in times), 0.0),
                update_time_s=sum((each.update_s for each in times), 0.0),
                sockets=sockets,
                device_memory_bytes=memory_bytes,
                device_memory_total_bytes=memory_total_bytes,
                times_split=self.times_split,
                link_bytes_per_s=link_bytes_per_s,
                link_peer=link_peer,
                waiting_time_s=waiting_time_s,
            ),
            noise=noise,
            held_out_accuracy=held_out_accuracy,
            learning_rate=self.learning_rate(),
            coded=self._coded_before.since(coded_before),
            wall_s=self._taken_s - taken_s,
            data_digest=self._data_digest,
        )


def _total(values: Sequence[Scalar | None]) -> float | None:
    """Their sum; unknown where one of them is."""
    known = [value for value in values if value is not None]
    return float(sum(_to_floats(known))) if len(known) == len(values) else None


def detached(name: str, value: Scalar | None) -> Scalar | None:
    """A number that the user's code cannot change afterwards: at once on the CPU, a copy on the device elsewhere.

    Raises:
        ValueError: when it is of several elements, or no number.
    """
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"session.step({name}): a tensor of shape {tuple(value.shape)}: pass one number, as the criterion "
                "reduces it over the batch"
            )
        return value.detach().clone().float() if value.is_cuda else value.item()
    number: float = checked(f"session.step({name})", value, float)
    return number


def _to_floats(values: Sequence[Scalar]) -> list[float]:
    """The values as numbers; all that are on a device come over together."""
    tensors = [value.reshape(()).double() for value in values if isinstance(value, torch.Tensor)]
    fetched = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(fetched) if isinstance(value, torch.Tensor) else float(value) for value in values]
