"""Exact weighting: g = sum_i (b_i / B) g_i, whatever the local batch sizes (method section 5.1).

Under DDP a communication hook does it, so that the user's loss stays what it was; it also yields |g_i|^2 and |G|^2:
each is one more pass over the gradient, as the weighing itself is (docs/overhead.md), hence not on every step.
Under tracking it also carries every rank's compute time (`time_slots`). Elsewhere the loss itself is scaled
(`loss_weight`). A step of several micro-batches is exchanged with its last one (`accumulation`).
"""

import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # = dist.GradBucket, which torch's own stubs do not know
from torch.nn.parallel import DistributedDataParallel

from dynamix.trainer.communication.lent_tensors import launched
from dynamix.trainer.communication.model_exchange import ModelExchange, StepExchange
from dynamix.trainer.data.plan import MicroBatch

from .buckets import NOT_MEASURED, Arrived, ModelBucket, SentBucket, SquaredNorms, Waitable, squared_norm, view_of
from .codecs import GradientCodec
from .losses import LossWarnings
from .noise import NormSketch, SecondMoments, is_measured
from .time_slots import TimeSlots
from .weights import StepWeights

Reduction = Literal["mean", "sum"]
"""What the user's loss does over the samples of its batch."""

BaseHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""A DDP communication hook that averages over ranks, as torch's own do."""


class GradientClock(Protocol):
    """What the hook reports of the times of a step, and what it asks for."""

    def gradient_ready(self) -> None:
        """This rank's last bucket is ready to be reduced."""

    def reduced(self) -> None:
        """The gradient came back; of several backward passes the last one counts."""

    def seconds_per_sample(self) -> float:
        """Compute time over samples of the newest step completed and not yet returned; 0 without one."""


def loss_weight(batch: MicroBatch, reduction: Reduction) -> int:
    """What the loss of a batch counts in the sum over its step: a mean its weight, a sum 1, a dummy nothing."""
    return (batch.weight if reduction == "mean" else min(batch.weight, 1)) * batch.loss_divisor


def gloo_of(group: dist.ProcessGroup) -> Any:
    """What reduces a group's tensors on the CPU, if gloo does."""
    if "gloo" not in dist.get_backend_config(group):
        return None
    return group._get_backend(torch.device("cpu"))  # noqa: SLF001 - no public name


class GradientHook:
    """The communication hook of one DDP model, in one session.

    `launch` and `wait` are what plain DDP does, too.

    Without a base hook a bucket is scaled and summed over ranks. A base hook averages: its buckets are scaled N times
    as much. A rank without samples zeroes its bucket: its dummy batch may have any gradient, and NaN * 0 is NaN.

    No thread of the process group calls Python: such a call is dropped by that thread, after the training went on, and
    so perhaps while the interpreter is being taken down (`lent`). Instead the hook of the last bucket waits for all, in
    the training thread, where DDP itself would wait right after it: every gradient is computed by then.
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
        codec: GradientCodec | None = None,
        exchange: ModelExchange,
        losses: LossWarnings | None = None,
    ) -> None:
        """`exchange` carries out what decisions say about how gradients travel."""
        self.group = group
        self._gloo = gloo_of(group)
        self._rank = dist.get_rank(group)
        self._clock = clock
        self._weights = weights
        self._reduction = reduction
        self._losses = losses
        self._base_hook = base_hook
        self._base_state = base_state
        self._codec = codec
        self._sends = self._is_local = False
        """Whether the step's buckets go through `model_exchange`, or stay on this rank."""
        self._numbers: Waitable | None = None
        """Time slots on their way beside the buckets."""
        self._noise_every = noise_every
        self._second_moments = second_moments
        self.model_exchange = exchange
        self.num_reduced = 0
        """Gradients exchanged so far: one per step, or more where the script calls `backward` more often."""
        self.sketch: NormSketch | None = None
        """The norms of a local step, where they are measured."""
        self.reduced_at = 0.0
        self._measures = False
        self._shares = False
        self._weighs = False
        """Whether a step of the session is under way."""
        self.is_retired = False
        self._world_size = dist.get_world_size(group)
        self._slots = TimeSlots(self._rank, self._world_size)
        self._scale = 1.0 if base_hook is not None else 1.0 / self._world_size
        self._to_mean = 0.0
        self._local: dict[int, float | torch.Tensor] = {}
        self._reduced: dict[int, float | torch.Tensor] = {}
        self._sent: list[SentBucket] = []
        self._buckets: dict[int, ModelBucket] = {}
        """By number: DDP makes its buckets once, and once more after the first step."""

    def begin(
        self,
        batch: MicroBatch,
        *,
        shares_times: bool = False,
        ruling: StepExchange | None = None,
        sketches: bool = False,
    ) -> None:
        """Set the weights of a step by its last batch; earlier ones are in its scale by then (`accumulation`).

        With `shares_times` all ranks learn each other's compute times: on all ranks or on none, and not over a base
        hook, since what it does with slots is not known. `ruling` says how the gradient travels, `None` by DDP's own
        all-reduce. In a local step norms are measured where it `sketches` them.
        """
        assert not (shares_times and (self._base_hook or self._codec)), "base hooks and codecs carry no times"
        self._shares = shares_times
        self._is_local = ruling is not None and ruling.exchange.every > 1
        self._sends = ruling is not None and not self._is_local
        if ruling is not None:
            self.model_exchange.begin(ruling)
        weights = self._weights
        weight = (weights.newest if self._reduction == "mean" else min(weights.mine, 1)) * batch.loss_divisor
        ranks = 1 if self._base_hook is None else self._world_size
        self._weighs = True
        self._scale = ranks * weight * (weights.local_factor() if self._is_local else weights.factor())
        self._to_mean = (weight / weights.mine) ** 2 if weights.mine else 1.0
        self._measures = not self._is_local and is_measured(batch.plan.step, self._noise_every)
        if self._measures and self._second_moments is not None:
            self._measures = self._second_moments.begin()
        counts = batch.plan.counts
        self.sketch = NormSketch(batch.plan.step, counts.values[self._rank] / counts.total) if sketches else None
        self._local.clear()
        self._reduced.clear()
        self._sent.clear()  # of a backward pass that failed
        self._numbers = None

    def average_plainly(self) -> None:
        """Average over the ranks as DDP does without a hook, until a step begins: on batches of the script's own."""
        self._scale = 1.0 if self._base_hook is not None else 1.0 / self._world_size
        self._weighs = self._measures = self._shares = self._sends = self._is_local = False
        self.sketch = None

    def retire(self) -> None:
        """The same for good: the session has ended."""
        self.average_plainly()
        self.is_retired = True

    def take_norms(self) -> SquaredNorms:
        """The squared norms of the step that ends; empty when it was not measured or no gradient was reduced."""
        if not self._reduced:
            return NOT_MEASURED
        squared = self._weights.over_mean() ** 2 or 1.0  # 0: nothing counted, so all are 0
        return SquaredNorms(
            [value * self._to_mean for value in self._local.values()],
            [value / squared for value in self._reduced.values()],
        )

    def take_times(self) -> list[float] | None:
        """Seconds per sample by rank as the all-reduce brought them, 0 where unknown (`TimeSlots.take_seconds`)."""
        return self._slots.take_seconds()

    def reduce(
        self,
        group: dist.ProcessGroup,
        bucket: GradBucket,  # DDP passes it by this name
    ) -> torch.futures.Future[torch.Tensor]:
        """The hook itself: called by DDP for each bucket, in order, in the thread of the backward pass."""
        buffer, number, is_last = bucket.buffer(), bucket.index(), bucket.is_last()
        known = self._buckets.get(number)
        if known is None or known.buffer is not buffer:
            known = self._buckets[number] = ModelBucket(buffer)
        if self._losses is not None:
            self._losses.gradient_begins()
        if is_last and self._weighs:
            self._clock.gradient_ready()
            self._weights.post()
        if self._measures:
            if self._second_moments is not None:
                self._second_moments.read(bucket)
            self._local[number] = self._squared_norm(buffer, number) if self._scale else 0.0
        if self._sends or self._is_local:
            under_way = self._send(bucket, known)
        else:
            under_way = self._launch(group, bucket, known, is_last=is_last)
        reduced = known.reduced or known.make_future()
        self._sent.append(SentBucket(number, known, under_way, reduced))
        if is_last:
            self._finish(self.wait())
        return reduced

    def _launch(self, group: dist.ProcessGroup, bucket: GradBucket, known: ModelBucket, *, is_last: bool) -> Waitable:
        """Weigh a bucket and begin to sum it over ranks as DDP does, or as the script's own hook or codec does."""
        buffer = known.buffer
        if is_last and self._shares:
            weighed = self._slots.extend(buffer, self._scale, self._clock.seconds_per_sample())
        else:
            weighed = known.weigh(self._scale)
        if self._base_hook is None:
            encoded = weighed if self._codec is None else self._codec.encode(weighed, bucket.index())
            alias = known.lend(encoded, buffer if weighed is buffer else self._slots.gradient)
            return self.launch(group, alias)
        return self._call_base_hook(self._base_hook, bucket)

    def _send(self, bucket: GradBucket, known: ModelBucket) -> Waitable:
        """Weigh a bucket and begin to sum it as the exchange of the step says; in local steps it stays on this rank."""
        if self._sends or self._scale != 1.0:
            known.weigh(self._scale)
        known.stay()
        if self._is_local:
            if self.sketch is not None:
                self.sketch.add(known.buffer, bucket.index())
            return Arrived()
        if known.view is None:
            known.view = view_of(bucket, known.buffer, self.model_exchange.keys)
        under_way = self.model_exchange.send(known.view)
        if bucket.is_last() and self._shares:
            self._numbers = self.model_exchange.send_plainly(self._slots.write_apart(self._clock.seconds_per_sample()))
        return under_way

    def _call_base_hook(self, base_hook: BaseHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return launched(base_hook, self._base_state, bucket)

    def exchange(self, model: DistributedDataParallel) -> None:
        """Exchange the gradients that the parameters have, bucket by bucket as the other ranks' backward pass does."""
        reducer = model.reducer
        reducer._push_all_rebuilt_params()  # noqa: SLF001 - as in torch's Join: the first step decides on new buckets
        sent = []
        for bucket in reducer._get_zeros_like_grad_buckets():  # noqa: SLF001 - as there
            for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if parameter.grad is not None:
                    part.copy_(parameter.grad)
            sent.append((bucket, self.reduce(self.group, bucket)))
        for bucket, future in sent:
            bucket.set_buffer(future.wait())
            for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part)

    def launch(self, group: dist.ProcessGroup, alias: torch.Tensor) -> dist.Work:
        """Start an all-reduce as DDP does; `dist.all_reduce` checks arguments first, 20 us a bucket.

        On the CPU it is asked of gloo itself: the way there through torch's dispatcher costs as much again.
        """
        asked: dist.ProcessGroup = group if self._gloo is None or not alias.is_cpu else self._gloo
        return launched(asked.allreduce, [alias])

    def wait(self) -> list[Any]:
        """Wait, with the last bucket, until every bucket is reduced."""
        results = [sent.under_way.wait() for sent in self._sent]
        if self._numbers is not None:
            self._numbers.wait()
            self._numbers = None
            self._slots.receive_apart()
        self.num_reduced += 1
        self.reduced_at = time.perf_counter()
        if self._weighs:
            self._clock.reduced()
        return results

    def _finish(self, results: list[Any]) -> None:
        """Hand every bucket to DDP."""
        correction = self._weights.correction() if self._weighs else 1.0
        for sent, result in zip(self._sent, results, strict=True):
            reduced = self._result(sent, result)
            if correction != 1.0:
                reduced.mul_(correction)
            if self._measures:
                self._reduced[sent.number] = self._squared_norm(reduced, sent.number)
            if sent.reduced is not sent.bucket.reduced:
                sent.reduced.set_result(reduced)
        self._sent.clear()

    def _result(self, sent: SentBucket, result: Any) -> torch.Tensor:
        if self._base_hook is not None:
            return result if isinstance(result, torch.Tensor) else result[0]
        bucket = sent.bucket
        if self._codec is not None:
            assert bucket.encoded is not None, "encoded when it was sent"
            self._codec.decode(bucket.encoded, bucket.buffer, sent.number)
        elif bucket.result is not bucket.buffer:
            self._slots.receive()
        return bucket.result

    def _squared_norm(self, gradient: torch.Tensor, number: int) -> float | torch.Tensor:
        return squared_norm(gradient if self._second_moments is None else self._second_moments.divide(gradient, number))
