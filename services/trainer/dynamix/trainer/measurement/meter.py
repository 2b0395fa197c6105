"""The meter of one rank: everything that it observes of itself, taken as one row at the end of a window.

Numbers that are still on a GPU stay there until the window ends: one transfer per window, no wait per step.
"""

import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from dynamix.trainer.arguments.checks import number
from dynamix.trainer.data.sampler import MicroBatch
from dynamix.trainer.exchange.codec import CodedSquares
from dynamix.trainer.gradient.buckets import SquaredNorms
from dynamix.trainer.gradient.noise import NoiseSums
from dynamix.trainer.gradient.weighting import Reduction
from dynamix.trainer.local_steps.drift import RoundDrift

from .clock import AnyClock, StepTimes
from .energy import unmeasured
from .process import ProcessIdentity, this_process
from .rows import Row, make_row
from .sockets import PeerSockets

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
