"""Local steps: rounds in which each rank steps alone, and what all ranks have at their end.

In a round of h steps a rank's gradient is the mean of its own samples and is not sent. At its end all ranks have

    theta = theta_start + sum_i (n_i / sum n) (theta_i - theta_start)        n_i: samples of rank i in the round

by the codec and the route of the exchange, the same bits on each: only what moved is sent, so that an error of a codec
is one of a step. With a delay of d steps the mean is in flight while the first d steps of the next round are made; then
each rank swaps its own movement for it, as in CoCoD-SGD and Streaming DiLoCo: theta_start is the same on all ranks, and
theta where they wait for a mean.

A whole round may end with an outer step instead, with d the mean movement and v that of the rounds before; a round
that ends early goes to the mean:

    v <- m v + d,  theta = theta_start + r (m v + d)             r = (1 - m) / (1 - a) where no rate is given

The agreement a is the cosine between d and v, smoothed, from 0 to 1/2: rounds that go on in one direction move up to
twice as far, and noise that changes its direction is averaged. Rank 0's number counts, so that all use the same.

A round also ends before another exchange is in effect, and with an epoch; there all ranks wait. Buffers are averaged
where they wait; momentum and the like when local steps end, and with an epoch, so that a checkpoint there holds what
all ranks have. The learning rate stays that of the global batch, and so do Adam's second moments
(`correct_second_moments`).
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from dynamix.schemas.messages.allocation import Exchange
from dynamix.trainer.data.plan import StepPlan
from dynamix.trainer.exchange.codec import BucketPart, BucketView, Largest, Residuals, just
from dynamix.trainer.exchange.layout import local
from dynamix.trainer.exchange.nodes import sum_plainly
from dynamix.trainer.exchange.plan import ExchangePlan, ModelExchange, Sent, StepExchange, keeps_residuals
from dynamix.trainer.gradient.hook import CoveredModels, TimeSlots
from dynamix.trainer.gradient.learning_rate import Updates
from dynamix.trainer.gradient.noise import NOT_MEASURED, RoundMeasurement, SquaredNorms, StepSketches

_log = logging.getLogger("dynamix.trainer")

BUCKET_BYTES = 25 * 2**20
"""Size of a bucket of a sharded model: DDP's default."""


def mean_counts(num_samples: Iterable[int], num_steps: int) -> tuple[int, ...]:
    """Samples per step of each rank, to the nearest whole one."""
    return tuple((2 * number + num_steps) // (2 * num_steps) for number in num_samples)


class RoundDrift(NamedTuple):
    """One rank's part of a round: its buckets' squared norms; of a GPU they stay there until the window ends."""

    own: list[float | Tensor]
    """w_i |d_i|^2"""
    mean: list[float | Tensor]
    """|d|^2, the same on all ranks."""


MOST_AGREEMENT = 0.5


def agreement_after(before: float, dot: float, moved: float, velocity: float) -> float:
    """The agreement after a round whose movement d has these products with v, itself, and v with itself."""
    if not moved * velocity > 0.0:
        return before
    cosine = dot / math.sqrt(moved * velocity)
    return min(max((before + cosine) / 2 if before else cosine, 0.0), MOST_AGREEMENT)


def outer_step(exchange: Exchange, moved: Tensor, velocity: Tensor | None, agreement: float) -> Tensor:
    """The outer step, given the mean movement; `velocity` is updated, and only needed with momentum.

    Products and sums are apart, since a processor that joins them rounds once instead of twice.
    """
    if not exchange.has_outer_step:
        return moved
    step = moved
    if exchange.outer_momentum:
        assert velocity is not None, "momentum needs it"
        velocity.mul_(exchange.outer_momentum).add_(moved)
        step = velocity.mul(exchange.outer_momentum).add_(moved)
    return step.mul(exchange.outer_rate or (1.0 - exchange.outer_momentum) / (1.0 - agreement))


class FlatBucket:
    """Some parameters of one model, one behind the other: where they began, and how far they came."""

    def __init__(self, number: int, named: Sequence[tuple[str, Tensor]]) -> None:
        """Note where all of them are now, in float32 or float64."""
        self._number = number
        self._tensors = [local(each.detach()) for _, each in named]
        is_double = any(each.dtype == torch.float64 for each in self._tensors)
        self._dtype = torch.float64 if is_double else torch.float32
        ends = itertools.pairwise(itertools.accumulate((each.numel() for each in self._tensors), initial=0))
        self._parts = tuple(
            BucketPart(key, start, stop, each.shape)
            for (key, _), each, (start, stop) in zip(named, self._tensors, ends, strict=True)
        )
        self._start = self._flat()
        self._left: Tensor | None = None
        """Where they were when their movement was sent, while steps go on."""

    def _flat(self) -> Tensor:
        return torch.cat([each.reshape(-1).to(self._dtype) for each in self._tensors])

    def moved(self, weight: float, *, goes_on: bool) -> BucketView:
        """The movement of the parameters, times this rank's weight; `goes_on`: steps are made before `move`."""
        flat = self._flat()
        self._left = flat.clone() if goes_on else None
        flat.sub_(self._start)
        flat = flat.mul_(weight) if weight else flat.zero_()  # not times zero: what does not count may be anything
        return BucketView(self._number, flat, self._parts)

    def move(self, by: Tensor) -> None:
        """Put them where they began, moved by so much, and by the steps since then."""
        place = self._start.add_(by)
        if self._left is not None:
            place, self._left = self._flat().sub_(self._left).add_(self._start), None
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            tensor.copy_(place[part.start : part.stop].view(tensor.shape))


def share_buffers(tensors: Iterable[Tensor], exchange: ModelExchange, weight: float, *, is_first: bool) -> None:
    """Replace buffers by their weighted mean over ranks, and whole numbers by those of rank 0; a collective.

    In float64, so that what is the same on all ranks stays so.
    """
    under_way = []
    for tensor in tensors:
        place = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if place.is_floating_point():
            value = place.to(torch.float64, copy=True)
            value = value.mul_(weight) if weight else value.zero_()
        else:
            value = place.to(torch.int64, copy=True) if is_first else torch.zeros_like(place, dtype=torch.int64)
        under_way.append((place, value, exchange.send_plainly(value)))
    for place, value, sent in under_way:
        sent.wait()
        place.copy_(value)


class StatePlace(NamedTuple):
    """Position of a tensor in an optimizer's state, the same on all ranks."""

    optimizer: int
    parameter: int
    """Among those of all groups."""
    name: str
    shape: tuple[int, ...]
    dtype: str


def state_places(optimizers: Sequence[torch.optim.Optimizer]) -> list[StatePlace]:
    """The places of this rank's optimizer state; optimizers with integers, such as quantized ones, are left out."""
    found = []
    for number, optimizer in enumerate(optimizers):
        places = [
            StatePlace(number, index, name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for index, parameter in enumerate(_parameters(optimizer))
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]
        if all(getattr(torch, place.dtype).is_floating_point or place.shape == () for place in places):
            found += places
        else:
            _log.warning("the state of %s cannot be averaged, each rank keeps its own", type(optimizer).__name__)
    return found


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


@dataclass
class _Round:
    """A round under way."""

    buckets: list[tuple[ModelExchange, FlatBucket]]
    """The parameters at the start of the round."""
    counts: list[int]
    """Samples so far, by rank."""
    computed_s: float = 0.0
    """Compute time of this rank in steps whose time is known."""
    num_timed: int = 0
    """Its samples in these."""


class _Movements(NamedTuple):
    """The movements of a round on their way, and what was sent beside them."""

    buckets: list[tuple[ModelExchange, FlatBucket, BucketView, Sent]]
    own: list[float | Tensor]
    """w_i |d_i|^2 by bucket."""
    shares_times: bool
    counts: tuple[int, ...]
    """Samples per step, by rank."""
    is_whole: bool
    sketches: StepSketches | None
    beside: list[Tensor]


class EndedRound(NamedTuple):
    """A round whose mean the ranks have."""

    seconds_per_sample: list[float] | None
    """By rank, where they are to be shared."""
    counts: tuple[int, ...]
    """Samples per step, by rank."""
    norms: SquaredNorms
    """Where its noise is measured."""
    drift: RoundDrift | None


NOT_ENDED = EndedRound(None, (), NOT_MEASURED, None)


@dataclass(eq=False)
class LocalSteps:
    """Rounds of local steps of the models of one session; nothing where no exchange asks for them."""

    exchange: ExchangePlan
    models: CoveredModels
    updates: Updates
    gather: Callable[[list[StatePlace]], list[list[StatePlace]]]
    """Returns what every rank has, from what this one has."""
    noise_every: int

    def __post_init__(self) -> None:
        """Begin without a round."""
        self._measurement = RoundMeasurement(self.noise_every)
        self._slots = TimeSlots(self.exchange.rank, self.exchange.world_size)
        self._round: _Round | None = None
        self._num_steps = 0
        self._sketches: StepSketches | None = None
        """Those of the first step of the round, where its noise is measured."""
        self._in_flight: _Movements | None = None
        """Those of the round before."""
        self._velocities: dict[ModelExchange, Residuals] = {}
        """Momentum of the outer steps: laid out as buckets are, kept by parameter as residuals are."""
        self.agreement = 0.0
        """How far the newest rounds agree."""

    @property
    def is_begun(self) -> bool:
        """Whether the current step is local."""
        return self._round is not None

    @property
    def is_averaged(self) -> bool:
        """Whether all ranks have the same parameters."""
        return self._num_steps == 0 and self._in_flight is None

    def share(self, plan: StepPlan) -> float:
        """The share of a step's samples behind this rank's gradient, which may be that of its node."""
        if not self.is_begun:
            return 1.0
        return sum(plan.counts.values[rank] for rank in self.exchange.together) / plan.counts.total

    def outer_momentum(self) -> list[dict[str, Tensor]]:
        """The momentum of each model's outer steps, by parameter; the same on all ranks, copied to the CPU."""
        kept = [self._velocities[each].by_key() if each in self._velocities else {} for each in self.models.exchanges]
        return [{key: part.cpu().clone() for key, part in parts.items()} for parts in kept]

    def load_outer_momentum(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Go on from what `outer_momentum` returned."""
        for model, parts in zip(self.models.exchanges, saved, strict=False):
            if parts:
                self._velocities.setdefault(model, Residuals()).load(parts)

    def begin(self, step: int) -> None:
        """Begin a step; the first one of a round notes where it begins, the first of all shares rank 0's buffers."""
        if self._round is not None or self.exchange.at(step).every == 1:
            return
        self.exchange.pipeline()
        buckets: list[tuple[ModelExchange, FlatBucket]] = []
        for model, exchange in zip(self.models.models, self.models.exchanges, strict=True):
            cap = BUCKET_BYTES
            if isinstance(model, DistributedDataParallel):  # FSDP2 leaves each rank its buffers
                cap = model.bucket_bytes_cap
                if model.broadcast_buffers and model.modules_buffers:
                    is_first = self.exchange.rank == 0
                    share_buffers(model.modules_buffers, exchange, float(is_first), is_first=is_first)
                    model.broadcast_buffers = False
                    self.models.unshared.append(model)
            trained = [
                (key, parameter)
                for parameter, key in exchange.keys.items()
                if parameter.requires_grad and local(parameter).numel()  # a shard may be empty
            ]
            numbers, _ = c10d._compute_bucket_assignment_by_size(  # noqa: SLF001 - as DDP does, each of one type
                [local(parameter.detach()) for _, parameter in trained], [cap]
            )
            for number, indices in enumerate(numbers):
                buckets.append((exchange, FlatBucket(number, [trained[index] for index in indices])))
        self._round = _Round(buckets, [0] * self.exchange.world_size)

    def measures(self, step: int) -> bool:
        """Whether the noise is measured on a step: the first one of a round, where one is due."""
        return self._round is not None and self._measurement.measures(step, begins_round=self._num_steps == 0)

    def end_step(self, plan: StepPlan, *, ends_epoch: bool, seconds_per_sample: float | None) -> EndedRound:
        """End a step; with a round's last one, a collective, the ranks have their mean, or it is on its way."""
        assert self._round is not None, "the step was not local"
        self._num_steps += 1
        self._sketches = self.models.take_sketches(plan) or self._sketches
        for rank, count in enumerate(plan.counts.values):
            self._round.counts[rank] += count
        if seconds_per_sample is not None and seconds_per_sample > 0.0:
            num_samples = plan.counts.values[self.exchange.rank]
            self._round.computed_s += seconds_per_sample * num_samples
            self._round.num_timed += num_samples
        exchange, following = self.exchange.at(plan.step), self.exchange.at(plan.step + 1)
        ended, is_last = NOT_ENDED, exchange != following or ends_epoch
        if self._in_flight is not None and (self._num_steps == exchange.delay or is_last):
            ended = self._receive(exchange)
        if self._num_steps < exchange.every and not is_last:
            return ended
        shares_times = seconds_per_sample is not None
        if exchange.delay and not is_last:
            self._send(exchange, following, shares_times=shares_times, goes_on=True)
            return ended
        weight, ended = self._average(exchange, following, shares_times=shares_times)
        if following.every == 1 or ends_epoch:
            self._average_optimizers(weight)
        if following.every == 1:
            self.leave()
        return ended

    def average(self, step: int) -> None:
        """End a round before its time; a collective. Nothing where all ranks have the same."""
        if self.is_averaged:
            return
        exchange = self.exchange.at(step - 1)
        if self._in_flight is not None:
            self._receive(exchange)
        if self._num_steps:
            self._sketches = None
            self._average_optimizers(self._average(exchange, exchange, shares_times=False)[0])

    def leave(self) -> None:
        """Restore DDP's broadcasts of buffers."""
        if not self.is_averaged and self.exchange.rank == 0:
            _log.warning(
                "the session ends in the middle of a round of local steps: each rank has parameters of its own; call "
                "session.average() on all ranks before"
            )
        self.models.broadcast_buffers()
        self._round, self._in_flight, self._num_steps = None, None, 0

    def _average(self, exchange: Exchange, following: Exchange, *, shares_times: bool) -> tuple[float, EndedRound]:
        """Give all ranks the mean; returns this rank's weight in it as well."""
        weight = self._send(exchange, following, shares_times=shares_times, goes_on=False)
        for covered, model in zip(self.models.models, self.models.exchanges, strict=True):
            if covered in self.models.unshared:
                share_buffers(covered.modules_buffers, model, weight, is_first=self.exchange.rank == 0)
        ended = self._receive(exchange)
        if following != exchange:  # another period moves another distance
            self._velocities.clear()
            self.agreement = 0.0
        self._round = None
        return weight, ended

    def _send(self, exchange: Exchange, following: Exchange, *, shares_times: bool, goes_on: bool) -> float:
        """Send how far this rank has moved, and begin the next round; returns its weight in the mean."""
        assert self._round is not None, "no round"
        counts, layout = self._round.counts, self.exchange.layout
        together = (self.exchange.rank,) if layout is None else layout.inside
        weight = sum(counts[rank] for rank in together) / sum(counts)
        step = StepExchange(exchange, flushes=not keeps_residuals(exchange, following))
        beside = [each.cells for each in self._sketches.sketches] if self._sketches else []
        if shares_times:
            seconds_per_sample = self._round.computed_s / max(self._round.num_timed, 1)
            beside.append(self._slots.write_apart(seconds_per_sample).tensor)
        if not exchange.outer_rate:
            beside.append(torch.tensor([self.agreement if self.exchange.rank == 0 else 0.0]))
        buckets: list[tuple[ModelExchange, FlatBucket, BucketView, Sent]] = []
        own: list[float | Tensor] = []
        for model, bucket in self._round.buckets:
            model.begin(step)
            view = bucket.moved(weight, goes_on=goes_on)
            own.append(torch.dot(view.flat, view.flat) / weight if weight else 0.0)
            buckets.append((model, bucket, view, model.send(view, () if buckets else beside)))
        per_step = mean_counts(counts, self._num_steps)
        is_whole = self._num_steps == exchange.every
        self._in_flight = _Movements(buckets, own, shares_times, per_step, is_whole, self._sketches, beside)
        self._round, self._num_steps, self._sketches = _Round(self._round.buckets, [0] * len(counts)), 0, None
        return weight

    def _receive(self, exchange: Exchange) -> EndedRound:
        """Take the mean of what was sent."""
        assert self._in_flight is not None, "nothing was sent"
        sent, self._in_flight = self._in_flight, None
        drift = RoundDrift(sent.own, [])
        for *_, under_way in sent.buckets:
            under_way.wait()
        for numbers in sent.beside:
            self.exchange.sum_shards(numbers)
        agreed = 0.0 if exchange.outer_rate else sent.beside[-1].item()
        dot = squares = 0.0
        for model, bucket, view, _ in sent.buckets:
            drift.mean.append(torch.dot(view.flat, view.flat))
            if not sent.is_whole:
                bucket.move(view.flat)
                continue
            velocity = self._velocities.setdefault(model, Residuals()).of(view) if exchange.outer_momentum else None
            if velocity is not None and not exchange.outer_rate:
                dot += float(torch.dot(view.flat, velocity))
                squares += float(torch.dot(velocity, velocity))
            bucket.move(outer_step(exchange, view.flat, velocity, agreed))
        if squares:
            self.agreement = agreement_after(agreed, dot, sum(map(float, drift.mean)), squares)
        if self.exchange.layout is not None:
            moved = torch.tensor([sum(map(float, drift.mean))], dtype=torch.float64)
            self.exchange.sum_shards(moved)
            drift = RoundDrift(drift.own, [moved.item()])
        if sent.shares_times:
            self._slots.receive()
        norms = sent.sketches.norms() if sent.sketches else NOT_MEASURED
        return EndedRound(self._slots.take_seconds(), sent.counts, norms, drift)

    def _average_optimizers(self, weight: float) -> None:
        """Average the state that any rank has, in the same order on all; counts become the largest one."""
        optimizers, pipeline = self.updates.optimizers, self.exchange.pipeline()
        places = sorted({place for each in self.gather(state_places(optimizers)) for place in each})
        under_way = []
        parameters = [list(_parameters(optimizer)) for optimizer in optimizers]
        for place in places:
            optimizer, parameter = optimizers[place.optimizer], parameters[place.optimizer][place.parameter]
            state = optimizer.state[parameter]
            if not isinstance(state.get(place.name), Tensor):  # zero where there was none
                on_device = bool(place.shape) or any(
                    group.get(flag) for group in optimizer.param_groups for flag in ("capturable", "fused")
                )
                device, dtype = parameter.device if on_device else torch.device("cpu"), getattr(torch, place.dtype)
                like = parameter if place.shape == parameter.shape else torch.empty(place.shape, device=device)
                state[place.name] = torch.zeros_like(like, dtype=dtype)  # of a shard another one
            tensor = local(state[place.name].detach())
            if not tensor.numel():
                continue
            dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            value = tensor.to("cpu", dtype, copy=True)
            if place.shape:
                value = value.mul_(weight) if weight else value.zero_()
            leg = sum_plainly(value, self.exchange.nodes) if place.shape else just(Largest(value))
            under_way.append((tensor, value, pipeline.send(leg)))
        for tensor, value, sent in under_way:
            sent.wait()
            tensor.copy_(value)
