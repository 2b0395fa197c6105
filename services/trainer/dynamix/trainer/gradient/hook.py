"""Exact weighting: g = sum_i (b_i / B) g_i, whatever the local batch sizes.

Under DDP a communication hook does it, so that the user's loss stays what it was. Each bucket is weighed, measured
(|g_i|^2, on some steps) and sent: over all ranks, by an exchange, or nowhere in a local step. The last bucket's hook
waits for all and measures |G|^2. Elsewhere the loss itself is scaled (`loss_weight`).

A gradient's weight is known from the plan. Where the script counts in its batches (`attach(count_tokens=...)`) the
total over all ranks is one more all-reduce, posted when the last bucket is ready; until it is there, gradients are
divided by the total of the step before, and then corrected.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # = dist.GradBucket, which torch's own stubs do not know

from dynamix.trainer.data.plan import Counts, MicroBatch
from dynamix.trainer.exchange.codec import HALF_TYPES, BucketPart, BucketView
from dynamix.trainer.exchange.plan import ModelExchange, Sent, StepExchange
from dynamix.trainer.exchange.transport import LentTensor, launched
from dynamix.trainer.gradient.losses import LossWarnings
from dynamix.trainer.gradient.noise import NormSketch, is_measured

Reduction = Literal["mean", "sum"]
"""How the user's loss combines the samples of its batch."""

BaseHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""A DDP communication hook that averages over ranks, as torch's own do."""


class StepWeights:
    """The weights of the current step on this rank."""

    def __init__(
        self, post_total: Callable[[int], Callable[[], int]] | None = None, *, base_size: float | None = None
    ) -> None:
        """`post_total` begins to add up a number over all ranks, and returns what waits for the sum.

        It is `None` where the plan knows all weights.

        `base_size`, for losses that are a sum, is a batch of the script as it was written for: plain DDP divides by the
        ranks, and the script by its accumulation steps, so a gradient stays as large as with that batch.
        """
        self._base_size = base_size
        self._size = 1
        self.newest = 0
        """Weight of the newest micro-batch that has one: the scale in which gradients are added up."""
        self.mine = 0
        """Weight of the micro-batches so far."""
        self.expected = 0
        """The total over all ranks, or the last one known; equal on all ranks."""
        self._post_total = post_total
        self._posted: Callable[[], int] | None = None
        self._total: int | None = None

    def begin(self, batch: MicroBatch) -> int | None:
        """Begin a batch; returns the weight of the gradients accumulated so far, `None` if there are none."""
        before = self.newest
        if batch.is_first:
            self._size = batch.plan.counts.total
            known = None if self._post_total is None else self._total or self.expected
            self.expected = known or self._size
            self._posted = self._total = None
            self.mine, self.newest = batch.weight, batch.weight
            return None
        self.mine += batch.weight
        self.newest = batch.weight or before
        return before

    def post(self) -> None:
        """Tell all ranks the weight of this rank's step; a collective call where the script counts."""
        if self._post_total is not None and self._posted is None:
            self._posted = self._post_total(self.mine)

    def total(self) -> int:
        """The weight of the step on all ranks."""
        if self._post_total is None:
            return self.expected
        self.post()
        if self._total is None:
            assert self._posted is not None, "posted above"
            self._total = self._posted()
        return self._total

    def factor(self) -> float:
        """The factor on gradients that are weighted and summed over all ranks; up to `correction`."""
        return 1.0 / self.expected if self._base_size is None else self._base_size / self._size

    def local_factor(self) -> float:
        """The factor on this rank's weighted gradient in a local step, which gives the mean over the rank's samples."""
        return (1.0 if self._base_size is None else self._base_size) / self.mine if self.mine else 0.0

    def correction(self) -> float:
        """Factor on a gradient that was divided by `expected`."""
        if self._post_total is None or self._base_size is not None:
            return 1.0
        total = self.total()
        if total == self.expected:
            return 1.0
        return self.expected / total if total else 0.0

    def over_mean(self) -> float:
        """The gradient of the step over that of a loss that is a mean over what counts; 1 where it is one."""
        return 1.0 if self._base_size is None else self._base_size * self.total() / self._size


def loss_weight(batch: MicroBatch, reduction: Reduction) -> int:
    """The weight of a batch's loss in the sum over its step: for a sum 1, for a dummy 0."""
    return (batch.weight if reduction == "mean" else min(batch.weight, 1)) * batch.loss_divisor


class TimeSlots:
    """Seconds per sample of all ranks: each fills its own slot with float32, and one all-reduce adds them up.

    x + 0 is x in every order of additions, so all ranks read the same bits; each derives the split from them alone.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._lent = LentTensor(torch.zeros(world_size))
        self._received: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        """The slots that came back; from a GPU on their way to the host, until the event."""
        self._before: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def write(self, seconds_per_sample: float, device: torch.device | None = None) -> LentTensor:
        """The slots to be summed over ranks in place, on the host unless a `device` is named."""
        if self._lent.tensor.device != (device or torch.device("cpu")):
            self._lent = LentTensor(torch.zeros(len(self._lent.tensor), device=device))
        self._lent.tensor.zero_()
        self._lent.tensor[self._rank] = seconds_per_sample
        return self._lent

    def receive(self) -> None:
        """Take what `write` returned, now summed."""
        slots, arrived = self._lent.tensor, None
        if slots.is_cuda:
            slots = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True).copy_(slots, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._received = slots, arrived

    def take_seconds(self) -> list[float] | None:
        """Seconds per sample by rank, 0 where unknown, at the end of a step; `None` when none came back.

        On the CPU they are this step's. On a GPU they are those of the step before, which it has done by the time that
        this one is queued: nothing is waited for that would leave it idle, and no rank can be a step ahead of another.
        """
        received, self._received = self._received, None
        if received is None or received[1] is not None:
            received, self._before = self._before, received
        if received is None:
            return None
        slots, arrived = received
        if arrived is not None:
            arrived.synchronize()
        seconds: list[float] = slots.tolist()
        return seconds


class SquaredNorms(NamedTuple):
    """Per bucket of one step, |g_i|^2 of this rank's mean gradient and |G|^2; on a GPU still on the device.

    Both are empty on a step that was not measured.
    """

    local: list[float | torch.Tensor]
    reduced: list[float | torch.Tensor]
    counts: Counts | None = None
    """Sizes of the measured step; `None` if it is the step that just ended."""


NOT_MEASURED = SquaredNorms([], [])


class StepSketches(NamedTuple):
    """The sketches of one local step, by model, until their cells are summed."""

    sketches: list[NormSketch]
    counts: Counts
    """Sizes of the step."""
    over_mean: float
    """`StepWeights.over_mean` of the step."""

    def norms(self) -> SquaredNorms:
        """The squared norms, once the cells are summed."""
        squared = self.over_mean**2 or 1.0
        local: list[float | torch.Tensor] = [each.local / squared for each in self.sketches]
        return SquaredNorms(local, [each.reduced() / squared for each in self.sketches], self.counts)


def squared_norm(gradient: torch.Tensor) -> float | torch.Tensor:
    """|gradient|^2, in float32 where half precision would overflow; a number on the CPU, on a GPU still a tensor."""
    if gradient.dtype in HALF_TYPES:
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        squared = norm * norm
    else:
        squared = torch.dot(gradient, gradient)
    return squared if squared.is_cuda else squared.item()


class ModelBucket:
    """One bucket of the model, with everything that is the same in every step."""

    __slots__ = ("buffer", "factor", "lent", "reduced", "scale", "view")

    def __init__(self, buffer: torch.Tensor, *, is_in_place: bool) -> None:
        """`is_in_place`: the reduced gradient will be in the buffer itself, as a base hook does not promise."""
        self.buffer = buffer
        self.scale = 0.0
        """The value of `factor`. As a tensor it saves torch a third of the time of scaling a small bucket."""
        self.factor = torch.zeros((), dtype=torch.float64 if buffer.dtype == torch.float64 else torch.float32)
        self.lent: LentTensor | None = None
        """The tensor that the process group reduces, after the first use."""
        self.reduced: torch.futures.Future[torch.Tensor] | None = None
        """What DDP waits for, done from the beginning: it looks at it after the last bucket's hook, which waits for
        all. `None` on a GPU, where a future tells whose streams wait for which, and over base hooks."""
        if is_in_place and not buffer.is_cuda:
            self.reduced = torch.futures.Future()
            self.reduced.set_result(buffer)
        self.view: BucketView | None = None
        """The codec's view of it, after the first use."""

    def weigh(self, scale: float) -> None:
        """Scale the bucket in place."""
        if not scale:
            self.buffer.zero_()  # not times zero: a dummy batch may have made it NaN
        elif scale != 1.0:
            if scale != self.scale:
                self.scale = scale
                self.factor.fill_(scale)
            self.buffer.mul_(self.factor)


def view_of(bucket: GradBucket, buffer: torch.Tensor, keys: Mapping[torch.Tensor, str]) -> BucketView:
    """A codec's view of a bucket: where each parameter's gradient lies, if its rows are in one piece."""
    parts = []
    for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
        start = int(part.storage_offset() - buffer.storage_offset())
        has_rows = part.dim() > 1 and part.stride(0) * part.size(0) == part.numel()
        shape = part.shape if has_rows else torch.Size([part.numel()])
        parts.append(BucketPart(keys[parameter], start, start + part.numel(), shape))
    return BucketView(bucket.index(), buffer, tuple(parts))


_UnderWay = dist.Work | torch.futures.Future[torch.Tensor] | Sent | None
"""A bucket that is sent; `None` for one that stays on this rank."""


class _SentBucket(NamedTuple):
    number: int
    bucket: ModelBucket
    under_way: _UnderWay
    reduced: torch.futures.Future[torch.Tensor]


@dataclass(slots=True)
class _Step:
    """Parameters of a step for the hook, and the squared norms that it measured."""

    scale: float
    """Factor on the bucket; 0 zeroes it."""
    exchange: StepExchange | None = None
    """`None` for DDP's own all-reduce."""
    is_local: bool = False
    in_step: bool = False
    """Whether a step of the session is under way."""
    measures: bool = False
    shares_times: bool = False
    to_mean: float = 1.0
    """Factor on |g_i|^2 of what was added up, for that of the mean gradient."""
    local: dict[int, float | torch.Tensor] = field(default_factory=dict)
    reduced: dict[int, float | torch.Tensor] = field(default_factory=dict)


class GradientClock(Protocol):
    """The clock that the hook reports times of a step to, and asks: `measurement` imports this folder."""

    def gradient_ready(self) -> None:
        """This rank's last bucket is ready to be reduced."""

    def reduced(self) -> None:
        """The gradient came back; of several backward passes the last one counts."""

    def seconds_per_sample(self) -> float:
        """Compute time over samples of the newest step completed and not yet returned; 0 without one."""


class GradientHook:
    """The communication hook of one DDP model, in one session.

    Without a base hook a bucket is scaled and summed over ranks. A base hook averages: its buckets are scaled N times
    as much. A rank without samples zeroes its bucket: its dummy batch may have any gradient, and NaN * 0 is NaN.

    No thread of the process group calls Python: such a call is dropped by that thread, after the training went on, and
    so perhaps while the interpreter is being taken down (`LentTensor`). Instead the hook of the last bucket waits for
    all, in the training thread, where DDP itself would wait right after it: every gradient is computed by then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        clock: GradientClock,
        weights: StepWeights,
        *,
        reduction: Reduction,
        noise_every: int = 1,
        base_hook: BaseHook | None = None,
        base_state: object = None,
        exchange: ModelExchange,
        losses: LossWarnings | None = None,
    ) -> None:
        """`exchange` sends buckets in steps whose exchange is not DDP's own all-reduce."""
        self._group = group
        has_gloo = "gloo" in dist.get_backend_config(group)
        self._gloo: Any = group._get_backend(torch.device("cpu")) if has_gloo else None  # noqa: SLF001 - no public name
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._clock = clock
        self._weights = weights
        self._reduction = reduction
        self._losses = losses
        self._base_hook = base_hook
        self._base_state = base_state
        self._noise_every = noise_every
        self.model_exchange = exchange
        self.num_reduced = 0
        """Gradients exchanged so far: one per step, or more where the script calls `backward` more often."""
        self.reduced_at = 0.0
        self.sketch: NormSketch | None = None
        """The norms of a local step, where they are measured."""
        self.is_retired = False
        self._slots = TimeSlots(self._rank, self._world_size)
        self._times: dist.Work | Sent | None = None
        """Time slots on their way beside the buckets."""
        self._sent: list[_SentBucket] = []
        self._buckets: dict[int, ModelBucket] = {}
        """Buckets by number: DDP makes them once, and again after the first step."""
        self._step: _Step
        self.average_plainly()

    def begin(
        self, batch: MicroBatch, *, shares_times: bool, exchange: StepExchange | None, sketches: bool = False
    ) -> None:
        """Begin a step with its last batch; earlier ones are in its scale by then (`Accumulation`).

        With `shares_times` all ranks learn each other's compute times: on all ranks or on none, and not over a base
        hook. `exchange` is that of the step, `None` for DDP's own all-reduce. In a local step norms are measured where
        it `sketches` them.
        """
        assert not (shares_times and self._base_hook), "base hooks carry no times"
        is_local = exchange is not None and exchange.exchange.every > 1
        if exchange is not None:
            self.model_exchange.begin(exchange)
        weights, counts = self._weights, batch.plan.counts
        weight = (weights.newest if self._reduction == "mean" else min(weights.mine, 1)) * batch.loss_divisor
        ranks = 1 if self._base_hook is None else self._world_size
        self._step = _Step(
            scale=ranks * weight * (weights.local_factor() if is_local else weights.factor()),
            exchange=exchange,
            is_local=is_local,
            in_step=True,
            measures=not is_local and is_measured(batch.plan.step, self._noise_every),
            shares_times=shares_times,
            to_mean=(weight / weights.mine) ** 2 if weights.mine else 1.0,
        )
        self.sketch = NormSketch(batch.plan.step, counts.values[self._rank] / counts.total) if sketches else None
        self._sent.clear()  # of a backward pass that failed
        self._times = None

    def average_plainly(self) -> None:
        """Average over the ranks as DDP does without a hook, until a step begins: on batches of the script's own."""
        self._step = _Step(1.0 if self._base_hook is not None else 1.0 / self._world_size)
        self.sketch = None

    def retire(self) -> None:
        """The same for good: the session has ended."""
        self.average_plainly()
        self.is_retired = True

    def take_norms(self) -> SquaredNorms:
        """The squared norms of the step that ends; empty when it was not measured or no gradient was reduced."""
        step = self._step
        if not step.reduced:
            return NOT_MEASURED
        squared = self._weights.over_mean() ** 2 or 1.0  # 0: nothing counted, so all are 0
        return SquaredNorms(
            [value * step.to_mean for value in step.local.values()],
            [value / squared for value in step.reduced.values()],
        )

    def take_times(self) -> list[float] | None:
        """Seconds per sample by rank, 0 where unknown (`TimeSlots.take_seconds`)."""
        return self._slots.take_seconds()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook itself: called by DDP for each bucket, in order, in the thread of the backward pass."""
        buffer, number, is_last, step = bucket.buffer(), bucket.index(), bucket.is_last(), self._step
        known = self._buckets.get(number)
        if known is None or known.buffer is not buffer:
            known = self._buckets[number] = ModelBucket(buffer, is_in_place=self._base_hook is None)
        if self._losses is not None:
            self._losses.gradient_begins()
        if is_last and step.in_step:
            self._clock.gradient_ready()
            self._weights.post()
        if step.measures:
            step.local[number] = squared_norm(buffer) if step.scale else 0.0
        known.weigh(step.scale)
        under_way = self._send(bucket, known)
        # a future of its own for one step: on a GPU its streams wait for it, not the training thread
        reduced = known.reduced or torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._sent.append(_SentBucket(number, known, under_way, reduced))
        if is_last:
            self._finish()
        return reduced

    def _send(self, bucket: GradBucket, known: ModelBucket) -> _UnderWay:
        """Begin to sum a weighed bucket over ranks, and behind the last one what each rank's samples took."""
        step = self._step
        if step.is_local:
            if self.sketch is not None:
                self.sketch.add(known.buffer, bucket.index())
            return None
        if self._base_hook is not None:
            return launched(self._base_hook, self._base_state, bucket)
        under_way: dist.Work | Sent
        shares_times = step.shares_times and bucket.is_last()
        if step.exchange is not None:
            if known.view is None:
                known.view = view_of(bucket, known.buffer, self.model_exchange.keys)
            under_way = self.model_exchange.send(known.view)
            if shares_times:
                lent = self._slots.write(self._clock.seconds_per_sample())
                self._times = self.model_exchange.send_plainly(lent.tensor)
            return under_way
        if known.lent is None:
            known.lent = LentTensor(known.buffer)
        # dist.all_reduce checks arguments first, 20 us a bucket; the way through torch's dispatcher costs as much again
        group: dist.ProcessGroup = self._gloo if self._gloo is not None and known.buffer.is_cpu else self._group
        under_way = launched(group.allreduce, [known.lent.alias])
        if shares_times:
            lent = self._slots.write(self._clock.seconds_per_sample(), known.buffer.device)
            self._times = launched(group.allreduce, [lent.alias])
        return under_way

    def _finish(self) -> None:
        """Wait, with the last bucket, until every bucket is reduced; measure them and hand them to DDP."""
        step = self._step
        results: list[Any] = [None if each.under_way is None else each.under_way.wait() for each in self._sent]
        if self._times is not None:
            self._times.wait()
            self._times = None
            self._slots.receive()
        self.num_reduced += 1
        self.reduced_at = time.perf_counter()
        if step.in_step:
            self._clock.reduced()
        correction = self._weights.correction() if step.in_step else 1.0
        for sent, result in zip(self._sent, results, strict=True):
            reduced = sent.bucket.buffer
            if self._base_hook is not None:
                reduced = result if isinstance(result, torch.Tensor) else result[0]
            if correction != 1.0:
                reduced.mul_(correction)
            if step.measures:
                step.reduced[sent.number] = squared_norm(reduced)
            if sent.reduced is not sent.bucket.reduced:
                sent.reduced.set_result(reduced)
        self._sent.clear()
