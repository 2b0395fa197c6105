"""Exact weighting: g = sum_i (b_i / B) g_i, whatever the local batch sizes (method section 5.1).

Under DDP a communication hook does it, so that the user's loss stays what it was. For each bucket it runs the stages of
the step: weigh it, measure |g_i|^2, send it (over all ranks, by an exchange, or nowhere in a local step), and with the
last one wait for all and measure |G|^2. A measurement is one more pass over the gradient, hence not on every step
(docs/overhead.md). Elsewhere the loss itself is scaled (`loss_weight`).

A gradient's weight is known from the plan, without a message. Where the script counts in its batches
(`attach(count_tokens=...)`) only the rank that has a batch knows it: the total over all ranks is one all-reduce of a
number, posted when the last bucket is ready, so that no rank waits while it computes. Until then gradients are divided
by the total of the step before, and once reduced by what that was wrong.

Under tracking the all-reduce also carries each rank's compute time: one slot per rank behind the last bucket. A rank
writes seconds per sample into its slot and zero into the others'. x + 0 is x in every format and order, so all ranks
read the same numbers, to the bit; they must, for each derives the split from them alone. A slot has the gradient's
format: 24 binary digits in float32, 11 in float16, 8 in bfloat16, which is 0.4 %. It counts milliseconds, so that
float16 holds from 60 ns to 65 s per sample.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # = dist.GradBucket, which torch's own stubs do not know
from torch.nn.parallel import DistributedDataParallel

from dynamix.trainer.data.plan import Counts, MicroBatch
from dynamix.trainer.exchange.codec import BucketPart, BucketView
from dynamix.trainer.exchange.plan import ModelExchange, StepExchange
from dynamix.trainer.exchange.transport import LentTensor, launched
from dynamix.trainer.gradient.losses import LossWarnings
from dynamix.trainer.gradient.noise import HALF, NormSketch, SecondMoments, is_measured

Total = Callable[[], int]
"""Waits for a number that was posted."""


class TotalExchange(Protocol):
    """Sum a number over ranks."""

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
        """Whether each sample of a batch has the same share of its weight."""
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
        """The factor on gradients that are weighted and summed over all ranks; up to `correction`."""
        return 1.0 / self.expected if self._base_size is None else self._base_size / self._size

    def local_factor(self) -> float:
        """The factor on this rank's weighted gradient in a local step, which gives the mean over the rank's samples."""
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


SLOT_PER_S = 1000.0
"""Slots count milliseconds."""


class TimeSlots:
    """Slots behind one model's last bucket: written before the all-reduce, read after it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._make_room(torch.empty(0))
        self._apart = torch.empty(0)
        self._received: _Received | None = None
        self._before: _Received | None = None

    def extend(self, bucket: torch.Tensor, scale: float, seconds_per_sample: float) -> torch.Tensor:
        """The bucket times `scale`, all zero for 0, and the slots behind it: to be summed over ranks in place."""
        if self.gradient.numel() != bucket.numel() or self.gradient.dtype != bucket.dtype:
            self._make_room(bucket)  # DDP rebuilds its buckets after the first step
        if scale:
            torch.mul(bucket, scale, out=self.gradient)
        else:
            self.gradient.zero_()  # not times zero: a dummy batch may have made it NaN
        self._slots.zero_()
        self._own.fill_(min(seconds_per_sample * SLOT_PER_S, self._largest))
        return self._buffer

    def write_apart(self, seconds_per_sample: float) -> torch.Tensor:
        """The slots by themselves, in float32: to be summed over ranks in place, where a codec has the bucket."""
        self._apart = torch.zeros(self._world_size)
        self._apart[self._rank] = seconds_per_sample * SLOT_PER_S
        return self._apart

    def receive_apart(self) -> None:
        """Take what `write_apart` returned, now summed."""
        self._received, self._before = _Received(self._apart), None

    def receive(self) -> torch.Tensor:
        """Take the slots off what was summed and return the gradient."""
        self._received = _Received(self._slots)
        return self.gradient

    def take_seconds(self) -> list[float] | None:
        """Seconds per sample by rank, 0 where unknown, at the end of a step; `None` when none came back.

        On the CPU they are this step's. On a GPU they are those of the step before, which it has done by the time that
        this one is queued: nothing is waited for that would leave it idle, and no rank can be a step ahead of another.
        """
        received, self._received = self._received, None
        if received is None or received.on_device:
            received, self._before = self._before, received
        return None if received is None else received.seconds()

    def _make_room(self, bucket: torch.Tensor) -> None:
        """A buffer for such a bucket, and the views of it that every step needs: each costs as much as an operation."""
        size = bucket.numel()
        self._buffer = bucket.new_empty(size + self._world_size)
        self.gradient, self._slots = self._buffer[:size], self._buffer[size:]
        self._own = self._slots[self._rank]
        self._largest = torch.finfo(bucket.dtype).max


class _Received:
    """Slots that came back; from a GPU on their way to the host."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.on_device = slots.is_cuda
        self._arrived: torch.cuda.Event | None = None
        self._slots = slots
        if slots.is_cuda:
            self._slots = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True).copy_(slots, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def seconds(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return [milliseconds / SLOT_PER_S for milliseconds in self._slots.tolist()]


class SquaredNorms(NamedTuple):
    """Per bucket of one step, |g_i|^2 of this rank's mean gradient and |G|^2; on a GPU still on the device.

    Both are empty on a step that was not measured.
    """

    local: list[float | torch.Tensor]
    reduced: list[float | torch.Tensor]
    counts: Counts | None = None
    """Sizes of the step that they are of, where that is not the step which they were known after."""


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


class ModelBucket:
    """One bucket of the model, with everything that is the same in every step."""

    __slots__ = ("buffer", "factor", "lent", "reduced", "result", "scale", "view")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.scale = 0.0
        """The value of `factor`. As a tensor it saves torch a third of the time of scaling a small bucket."""
        self.factor = torch.zeros((), dtype=torch.float64 if buffer.dtype == torch.float64 else torch.float32)
        self.lent: LentTensor | None = None
        """The tensor that the process group reduces."""
        self.result = buffer
        """The tensor that receives the reduced gradient."""
        self.reduced: torch.futures.Future[torch.Tensor] | None = None
        """What DDP waits for, done from the beginning: it looks at it after the last bucket's hook, which waits for
        all. `None` on a GPU, where a future tells whose streams wait for which, and over base hooks."""
        self.view: BucketView | None = None
        """The codec's view of it, after the first use."""

    def weigh(self, scale: float) -> torch.Tensor:
        """Scale the bucket in place."""
        if not scale:
            return self.buffer.zero_()  # not times zero: a dummy batch may have made it NaN
        if scale != self.scale:
            self.scale = scale
            self.factor.fill_(scale)
        return self.buffer.mul_(self.factor)

    def lend(self, sent: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """An alias of `sent` for a process group that reduces it."""
        if self.lent is None or self.lent.tensor is not sent:
            self.lent = LentTensor(sent)
            self._complete(result)
        return self.lent.alias

    def stay(self) -> None:
        """Have the reduced gradient in place, without a process group that gets the bucket itself."""
        if self.reduced is None or self.result is not self.buffer:
            self.lent = None
            self._complete(self.buffer)

    def _complete(self, result: torch.Tensor) -> None:
        self.result, self.reduced = result, None
        if not self.buffer.is_cuda:
            self.reduced = torch.futures.Future()
            self.reduced.set_result(result)


class Waitable(Protocol):
    """Something that takes its time."""

    def wait(self) -> Any:
        """Wait for it, and return what it brought, if anything."""


class Arrived:
    """Work that is done already."""

    def wait(self) -> None:
        """Return at once."""


class SentBucket(NamedTuple):
    """A bucket on its way."""

    number: int
    bucket: ModelBucket
    under_way: Waitable
    reduced: torch.futures.Future[torch.Tensor]


def view_of(bucket: GradBucket, buffer: torch.Tensor, keys: Mapping[torch.Tensor, str]) -> BucketView:
    """A codec's view of a bucket: where each parameter's gradient lies, if its rows are in one piece."""
    parts = []
    for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
        start = int(part.storage_offset() - buffer.storage_offset())
        has_rows = part.dim() > 1 and part.stride(0) * part.size(0) == part.numel()
        shape = part.shape if has_rows else torch.Size([part.numel()])
        parts.append(BucketPart(keys[parameter], start, start + part.numel(), shape))
    return BucketView(bucket.index(), buffer, tuple(parts))


def squared_norm(gradient: torch.Tensor) -> float | torch.Tensor:
    """|gradient|^2, in float32 where half precision would overflow; a number on the CPU, on a GPU still a tensor."""
    if gradient.dtype in HALF:
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        squared = norm * norm
    else:
        squared = torch.dot(gradient, gradient)
    return squared if squared.is_cuda else squared.item()


Reduction = Literal["mean", "sum"]
"""How the user's loss combines the samples of its batch."""

BaseHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""A DDP communication hook that averages over ranks, as torch's own do."""


class GradientClock(Protocol):
    """The clock of step times that the hook reports to."""

    def gradient_ready(self) -> None:
        """This rank's last bucket is ready to be reduced."""

    def reduced(self) -> None:
        """The gradient came back; of several backward passes the last one counts."""

    def seconds_per_sample(self) -> float:
        """Compute time over samples of the newest step completed and not yet returned; 0 without one."""


def loss_weight(batch: MicroBatch, reduction: Reduction) -> int:
    """The weight of a batch's loss in the sum over its step: for a sum 1, for a dummy 0."""
    return (batch.weight if reduction == "mean" else min(batch.weight, 1)) * batch.loss_divisor


@dataclass(slots=True)
class _Stages:
    """What the hook does with each bucket of a step, and the squared norms that it measured."""

    scale: float
    """Factor on the bucket; 0 zeroes it."""
    send: Callable[["GradientHook", GradBucket, ModelBucket], Waitable]
    """Weighs a bucket by `scale` and sends it, or keeps it on this rank."""
    in_step: bool = False
    """Whether a step of the session is in progress."""
    measures: bool = False
    shares_times: bool = False
    to_mean: float = 1.0
    """Factor on |g_i|^2 of what was added up, for that of the mean gradient."""
    local: dict[int, float | torch.Tensor] = field(default_factory=dict)
    reduced: dict[int, float | torch.Tensor] = field(default_factory=dict)


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
        second_moments: SecondMoments | None = None,
        base_hook: BaseHook | None = None,
        base_state: object = None,
        exchange: ModelExchange,
        losses: LossWarnings | None = None,
    ) -> None:
        """`exchange` sends buckets in steps whose exchange is not DDP's own all-reduce."""
        self.group = group
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
        self._second_moments = second_moments
        self.model_exchange = exchange
        self.num_reduced = 0
        """Gradients exchanged so far: one per step, or more where the script calls `backward` more often."""
        self.reduced_at = 0.0
        self.sketch: NormSketch | None = None
        """The norms of a local step, where they are measured."""
        self.is_retired = False
        self._slots = TimeSlots(self._rank, self._world_size)
        self._numbers: Waitable | None = None
        """Time slots on their way beside the buckets."""
        self._sent: list[SentBucket] = []
        self._buckets: dict[int, ModelBucket] = {}
        """Buckets by number: DDP makes them once, and again after the first step."""
        self._stages: _Stages
        self.average_plainly()

    def begin(
        self,
        batch: MicroBatch,
        *,
        shares_times: bool = False,
        exchange: StepExchange | None = None,
        sketches: bool = False,
    ) -> None:
        """Set the stages of a step by its last batch; earlier ones are in its scale by then (`micro_batches`).

        With `shares_times` all ranks learn each other's compute times: on all ranks or on none, and not over a base
        hook, since what it does with slots is not known. `exchange` is that of the step, `None` for DDP's own
        all-reduce. In a local step norms are measured where it `sketches` them.
        """
        assert not (shares_times and self._base_hook), "base hooks carry no times"
        is_local = exchange is not None and exchange.exchange.every > 1
        if exchange is not None:
            self.model_exchange.begin(exchange)
        weights = self._weights
        weight = (weights.newest if self._reduction == "mean" else min(weights.mine, 1)) * batch.loss_divisor
        ranks = 1 if self._base_hook is None else self._world_size
        measures = not is_local and is_measured(batch.plan.step, self._noise_every)
        if measures and self._second_moments is not None:
            measures = self._second_moments.begin()
        self._stages = _Stages(
            scale=ranks * weight * (weights.local_factor() if is_local else weights.factor()),
            send=GradientHook._send_plainly
            if exchange is None
            else (GradientHook._keep if is_local else GradientHook._send_coded),
            in_step=True,
            measures=measures,
            shares_times=shares_times,
            to_mean=(weight / weights.mine) ** 2 if weights.mine else 1.0,
        )
        counts = batch.plan.counts
        self.sketch = NormSketch(batch.plan.step, counts.values[self._rank] / counts.total) if sketches else None
        self._sent.clear()  # of a backward pass that failed
        self._numbers = None

    def average_plainly(self) -> None:
        """Average over the ranks as DDP does without a hook, on batches of the script outside of steps."""
        self._stages = _Stages(
            1.0 if self._base_hook is not None else 1.0 / self._world_size, GradientHook._send_plainly
        )
        self.sketch = None

    def retire(self) -> None:
        """The same for good: the session has ended."""
        self.average_plainly()
        self.is_retired = True

    def take_norms(self) -> SquaredNorms:
        """The squared norms of the step that ends; empty when it was not measured or no gradient was reduced."""
        stages = self._stages
        if not stages.reduced:
            return NOT_MEASURED
        squared = self._weights.over_mean() ** 2 or 1.0  # 0: nothing counted, so all are 0
        return SquaredNorms(
            [value * stages.to_mean for value in stages.local.values()],
            [value / squared for value in stages.reduced.values()],
        )

    def take_times(self) -> list[float] | None:
        """Seconds per sample by rank as the all-reduce brought them, 0 where unknown (`TimeSlots.take_seconds`)."""
        return self._slots.take_seconds()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook itself: called by DDP for each bucket, in order, in the thread of the backward pass."""
        buffer, number, is_last, stages = bucket.buffer(), bucket.index(), bucket.is_last(), self._stages
        known = self._buckets.get(number)
        if known is None or known.buffer is not buffer:
            known = self._buckets[number] = ModelBucket(buffer)
        if self._losses is not None:
            self._losses.gradient_begins()
        if is_last and stages.in_step:
            self._clock.gradient_ready()
            self._weights.post()
        if stages.measures:
            if self._second_moments is not None:
                self._second_moments.read(bucket)
            stages.local[number] = self._squared_norm(buffer, number) if stages.scale else 0.0
        under_way = stages.send(self, bucket, known)
        # a future of its own for one step: on a GPU its streams wait for it, not the training thread
        reduced = known.reduced or torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._sent.append(SentBucket(number, known, under_way, reduced))
        if is_last:
            self._finish()
        return reduced

    def _send_plainly(self, bucket: GradBucket, known: ModelBucket) -> Waitable:
        """Weight a bucket and start its sum over ranks as DDP, or the script's own hook, does."""
        stages, buffer = self._stages, known.buffer
        if self._base_hook is not None:
            known.weigh(stages.scale)
            return launched(self._base_hook, self._base_state, bucket)
        if stages.shares_times and bucket.is_last():
            weighed = self._slots.extend(buffer, stages.scale, self._clock.seconds_per_sample())
            alias = known.lend(weighed, self._slots.gradient)
        else:
            alias = known.lend(known.weigh(stages.scale), buffer)
        # dist.all_reduce checks arguments first, 20 us a bucket; the way through torch's dispatcher costs as much again
        asked: dist.ProcessGroup = self.group if self._gloo is None or not alias.is_cpu else self._gloo
        return launched(asked.allreduce, [alias])

    def _send_coded(self, bucket: GradBucket, known: ModelBucket) -> Waitable:
        """Weight a bucket and start its sum by the active exchange, with the times behind the last bucket."""
        known.weigh(self._stages.scale)
        known.stay()
        if known.view is None:
            known.view = view_of(bucket, known.buffer, self.model_exchange.keys)
        under_way = self.model_exchange.send(known.view)
        if bucket.is_last() and self._stages.shares_times:
            self._numbers = self.model_exchange.send_plainly(self._slots.write_apart(self._clock.seconds_per_sample()))
        return under_way

    def _keep(self, bucket: GradBucket, known: ModelBucket) -> Waitable:
        """Weigh a bucket of a local step, which stays on this rank."""
        if self._stages.scale != 1.0:
            known.weigh(self._stages.scale)
        known.stay()
        if self.sketch is not None:
            self.sketch.add(known.buffer, bucket.index())
        return Arrived()

    def exchange(self, model: DistributedDataParallel) -> None:
        """Exchange the gradients that the parameters have, bucket by bucket as the other ranks' backward pass does."""
        reducer = model.reducer
        reducer._push_all_rebuilt_params()  # noqa: SLF001 - as in torch's Join: the first step decides on new buckets
        sent = []
        for bucket in reducer._get_zeros_like_grad_buckets():  # noqa: SLF001 - as there
            for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if parameter.grad is not None:
                    part.copy_(parameter.grad)
            sent.append((bucket, self.reduce(bucket)))
        for bucket, future in sent:
            bucket.set_buffer(future.wait())
            for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part)

    def _finish(self) -> None:
        """Wait, with the last bucket, until every bucket is reduced; measure them and hand them to DDP."""
        stages = self._stages
        results = [sent.under_way.wait() for sent in self._sent]
        if self._numbers is not None:
            self._numbers.wait()
            self._numbers = None
            self._slots.receive_apart()
        self.num_reduced += 1
        self.reduced_at = time.perf_counter()
        if stages.in_step:
            self._clock.reduced()
        correction = self._weights.correction() if stages.in_step else 1.0
        for sent, result in zip(self._sent, results, strict=True):
            reduced = sent.bucket.result
            if self._base_hook is not None:
                reduced = result if isinstance(result, torch.Tensor) else result[0]
            elif reduced is not sent.bucket.buffer:
                self._slots.receive()
            if correction != 1.0:
                reduced.mul_(correction)
            if stages.measures:
                stages.reduced[sent.number] = self._squared_norm(reduced, sent.number)
            if sent.reduced is not sent.bucket.reduced:
                sent.reduced.set_result(reduced)
        self._sent.clear()

    def _squared_norm(self, gradient: torch.Tensor, number: int) -> float | torch.Tensor:
        return squared_norm(gradient if self._second_moments is None else self._second_moments.divide(gradient, number))
